"""GRPO training: data, rewards, losses, the fused step, the loop."""
