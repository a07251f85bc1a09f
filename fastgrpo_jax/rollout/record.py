"""What a rollout gives, block by block and in all."""

from collections.abc import Sequence
from typing import NamedTuple

from fastgrpo_jax import base
from fastgrpo_jax.rollout import strategy


class BlockRecord(NamedTuple):
    """One decode block as the host saw it."""

    rows: int
    slots: int
    strategy: base.DraftStrategy
    live: int
    seconds: float
    report: base.BlockReport


class Rollout(NamedTuple):
    """A finished rollout: what was said, and how it went.

    compiled: programs that were compiled meanwhile; their time is in prefill_seconds and
      decode_seconds, but not in the blocks' own.
    memory: what the controller has seen, to begin the next rollout with.
    """

    batch: base.RolloutBatch
    blocks: tuple[BlockRecord, ...]
    prefill_seconds: float
    decode_seconds: float
    compiled: int
    memory: strategy.Memory


def joined(runs: Sequence[Rollout]) -> Rollout:
    """Take rollouts that followed one another as one; the batch stays the last one's."""
    return runs[-1]._replace(
        blocks=tuple(block for run in runs for block in run.blocks),
        prefill_seconds=sum(run.prefill_seconds for run in runs),
        decode_seconds=sum(run.decode_seconds for run in runs),
        compiled=sum(run.compiled for run in runs),
    )


def statistics(run: Rollout) -> dict[str, float]:
    """Summarise a rollout's blocks as metrics; the drafter's own are of its rounds only."""
    rounds = sum(int(b.report.rounds) for b in run.blocks)
    row_rounds = sum(int(b.report.row_rounds) for b in run.blocks)
    emitted = sum(int(b.report.emitted) for b in run.blocks)
    off = sum(int(b.report.rounds) for b in run.blocks if not b.strategy.depth)
    out = {
        "spec/tokens_per_target_step": emitted / max(row_rounds, 1),
        "spec/live_rows_mean": row_rounds / max(rounds, 1),
        "spec/off_fraction": off / max(rounds, 1),
        "rollout/tokens_per_s": emitted / max(run.prefill_seconds + run.decode_seconds, 1e-9),
        "timing_s/prefill": run.prefill_seconds,
        "timing_s/decode": run.decode_seconds,
    }
    learned = [b for b in run.blocks if b.strategy.drafter == "learned"]
    drafted = learned or [b for b in run.blocks if b.strategy.depth]
    if sum(int(b.report.row_rounds) for b in drafted):
        out["spec/accept_length"] = sum(int(b.report.emitted) for b in drafted) / sum(
            int(b.report.row_rounds) for b in drafted
        )
        accepted = sum(b.report.accepted for b in drafted)
        tried = sum(b.report.tried for b in drafted)
        for i, (a, t) in enumerate(zip(accepted, tried)):
            if t:
                out[f"spec/accept_rate_pos_{i}"] = float(a / t)
    return out
