"""The rollout engine: drafting, verification, scheduling."""
