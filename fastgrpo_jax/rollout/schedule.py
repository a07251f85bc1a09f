"""Who sits where: which rows decode together, which wait, and when seats are filled again.

Pure host arithmetic on small integer arrays. Rows that finish give their seats to rows that
wait, those expected to be longest first, so that the longest do not begin last; once nobody
waits, the bucket shrinks. No order of admission changes a token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from fastgrpo_jax.rollout import buckets


class Seats(NamedTuple):
    """Lines of `Sequences` that the slots of a state work on, N for an empty one."""

    lines: Int[np.ndarray, " B"]
    waiting: tuple[int, ...]  # lines not yet admitted, in order


class Move(NamedTuple):
    """How the slots of the next state come about: from the old state's, or by admission.

    keep: slot of the old state that comes into each slot, B where none does.
    fresh: line that is admitted into each slot, N where none is.
    """

    seats: Seats
    keep: Int[np.ndarray, " C"]
    fresh: Int[np.ndarray, " C"]
    admitted: int


def order(group: int, prompts: int, expected: Sequence[float] | None) -> tuple[int, ...]:
    """List all lines in order of admission: longest expected prompt first, groups together."""
    ranks = range(prompts)
    if expected is not None:
        ranks = sorted(ranks, key=lambda i: -expected[i])
    return tuple(p * group + g for p in ranks for g in range(group))


def quantum(rows: int, keep_finished: bool) -> int:
    """Count the seats that must be free before they are filled: each refill copies the state."""
    return rows if keep_finished else max(1, rows // 8)


def begin(lines: tuple[int, ...], capacity: int, total: int = 0) -> Seats:
    """Make the seats before anybody sits: all empty. Of `total` lines (0: as many as are given)
    those that are not given are never admitted."""
    return Seats(np.full(capacity, total or len(lines), np.int32), lines)


def alive(seats: Seats, done: Bool[np.ndarray, " N"]) -> Int[np.ndarray, " b"]:
    """List the slots whose rows go on."""
    total = len(done)
    return np.flatnonzero((seats.lines < total) & ~done[np.minimum(seats.lines, total - 1)])


def seat(
    seats: Seats, done: Bool[np.ndarray, " N"], ladder: tuple[int, ...], keep_finished: bool = False
) -> Move:
    """Decide who sits where in the next block.

    Free seats are filled when there are enough of them (`quantum`).
    While rows wait the bucket stays the largest; afterwards it is the smallest that holds the
    rows that go on. With `keep_finished` a bucket is only left when all its rows are done.
    """
    size, total = len(seats.lines), len(done)
    going = alive(seats, done)
    free, count = ladder[-1] - len(going), 0
    if seats.waiting and free >= quantum(ladder[-1], keep_finished):
        count = min(free, len(seats.waiting))
    newcomers, waiting = seats.waiting[:count], seats.waiting[count:]
    rows = size
    if not (keep_finished or waiting):
        rows = buckets.at_least(ladder, max(len(going) + count, 1))
    if rows == size and not count:
        return Move(seats, np.arange(size, dtype=np.int32), np.full(size, total, np.int32), 0)
    empty = rows - len(going) - count
    keep = np.concatenate([going, np.full(count + empty, size)]).astype(np.int32)
    fresh = np.full(rows, total, np.int32)
    fresh[len(going) : len(going) + count] = newcomers
    lines = np.where(keep < size, np.append(seats.lines, total)[keep], fresh).astype(np.int32)
    return Move(Seats(lines, waiting), keep, fresh, count)


def leave_at(seats: Seats, ladder: tuple[int, ...], keep_finished: bool) -> int:
    """Say with how few live rows a block returns: when a refill or a smaller bucket is due."""
    rows = len(seats.lines)
    if seats.waiting:
        return rows - quantum(ladder[-1], keep_finished)
    return 0 if keep_finished else buckets.below(ladder, rows)
