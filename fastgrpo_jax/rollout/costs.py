"""What a round costs: curves measured once per machine and model, and the choices that can pay.

A verification of M nodes for B rows is matrix products over B * M tokens, read off the curve of
one row with as many tokens, and attention to B caches, which is what B rows of one token take
longer than one row of B; each drafted level adds one pass of the drafter. The blocks' own times
correct all of it later (`goodput`).
"""

import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.rollout import strategy

NEAR = 0.03  # share of the best value that a choice may lack and still do
PACKED = 1.08  # measured on a CPU: 1.05 to 1.12 of a whole forward of as many tokens
LIVE = 0.75  # of a bucket's rows, on the way from it to one of half its rows
LEVELS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # acceptances at which a choice may be the best


class Table(NamedTuple):
    """Seconds by size: of forwards of the policy, and of the drafter.

    Attributes:
      device: kind and count of what was measured.
      forward: by tokens of one row; strictly, of rows and nodes that share one cache.
      draft: by rows of one node; empty without a learned drafter.
      rows: by rows of one token; empty: their caches are taken to cost nothing.
    """

    device: str
    forward: dict[int, float]
    draft: dict[int, float]
    rows: dict[int, float]


def seconds(table: Table, bucket: base.Bucket, choice: base.DraftStrategy) -> float:
    """Predict the seconds of a round.

    forward(tokens) + caches(B) + depth * draft(B * width), the last for the learned drafter only;
    packing what rows share costs a little more.
    """
    total = _read(table.forward, choice.total(bucket.rows)) + _caches(table, bucket.rows)
    total *= PACKED if choice.share else 1.0
    if choice.drafter in ("learned", "hybrid") and table.draft:
        total += choice.depth * _read(table.draft, bucket.rows * choice.width)
    return total


def _caches(table: Table, rows: int) -> float:
    """Read what attention to so many caches adds, straight between the sizes measured."""
    if not table.rows:
        return 0.0
    sizes = sorted(table.rows)
    extra = [max(table.rows[size] - _read(table.forward, size), 0.0) for size in sizes]
    if rows > sizes[-1]:
        return extra[-1] * rows / sizes[-1]
    return float(np.interp(rows, sizes, extra))


def _read(curve: Mapping[int, float], tokens: int) -> float:
    """Interpolate a curve, straight between its points in log-log; beyond the last, by tokens."""
    sizes = sorted(curve)
    if tokens <= sizes[0]:
        return curve[sizes[0]]
    for low, high in itertools.pairwise(sizes):
        if tokens <= high:
            part = math.log(tokens / low) / math.log(high / low)
            return curve[low] * (curve[high] / curve[low]) ** part
    return curve[sizes[-1]] * tokens / sizes[-1]


def c_peak(table: Table) -> int:
    """Read the machine's knee off the table: the fewest tokens with 95 % of the best tokens/s."""
    return strategy.knee({size: size / s for size, s in table.forward.items()})


def candidates(drafter: str, rows: int) -> tuple[base.DraftStrategy, ...]:
    """List the strategies of a drafter that are worth weighing on any machine.

    Where there are some rows, they may share drafts out among them.
    """
    shared = [(1, 1.5), (2, 1.5), (2, 2.0), (3, 2.0), (4, 3.0), (6, 4.0)] if rows >= 4 else []
    if drafter == "learned":
        chains = [(d, 1, d + 1) for d in (1, 2, 3, 4, 5, 6, 8)]
        trees = [(2, 2, 4), (3, 2, 6), (3, 4, 8), (4, 4, 12), (5, 6, 24), (6, 8, 48)]
    else:
        chains, trees = [(d, 1, d + 1) for d in (1, 2, 3, 4, 6, 8)], []
    whole = [base.DraftStrategy(drafter, *x) for x in chains + trees]
    return (*whole, *(base.DraftStrategy(drafter, d, 1, d + 1, share) for d, share in shared))


def arms(
    table: Table, rows: int, drafters: Iterable[str], levels: Sequence[float] = LEVELS
) -> tuple[base.DraftStrategy, ...]:
    """List the choices of a bucket: few that hold something good for every acceptance.

    For each drafter as many as are needed so that at each of the levels one of them is about the
    best of all candidates there. Each choice is a program to compile and to try, so that two which
    are good at the same acceptances are one too many; the table could not tell them apart anyhow.
    Shares join where they are clearly better once a part of the rows has finished. A choice that
    does not beat plain decoding is none.
    """
    found = []
    for drafter in drafters:
        known = candidates(drafter, rows)
        whole = tuple(s for s in known if not s.share)
        plain = dict.fromkeys(levels, 1 / seconds(table, base.Bucket(rows, 0), base.PLAIN))
        found += _cover(_good(table, rows, whole, plain, 1.0))
        # Strategies that do not share give a row the same, however many of the others live.
        beaten = {
            level: max(_value(table, rows, s, level, LIVE) for s in (base.PLAIN, *whole))
            / (1 - NEAR)
            for level in levels
        }
        shares = tuple(s for s in known if s.share)
        found += _cover(_good(table, rows, shares, beaten, LIVE))
    return tuple(found)


def _value(table: Table, rows: int, choice: base.DraftStrategy, level: float, live: float) -> float:
    """Compute tokens of a row per second."""
    return tokens_at(choice, level, live) / seconds(table, base.Bucket(rows, 0), choice)


def _good(table: Table, rows: int, some, above: Mapping[float, float], live: float) -> dict:
    """List, by choice and level, the share of the best value: of those near it and `above`."""
    good: dict[base.DraftStrategy, dict[float, float]] = {}
    for level, least in above.items():
        value = {s: _value(table, rows, s, level, live) for s in some}
        best = max(value.values(), default=0.0)
        for s in some:
            if value[s] > least and value[s] >= best * (1 - NEAR):
                good.setdefault(s, {})[level] = value[s] / best
    return good


def _cover(good: Mapping[base.DraftStrategy, Mapping[float, float]]) -> list[base.DraftStrategy]:
    """Choose few that cover all levels, each time what covers most of the rest, and best."""
    found = []
    left = {level for covered in good.values() for level in covered}
    while left:
        gains = {
            s: (len(left & covered.keys()), sum(covered[x] for x in left & covered.keys()))
            for s, covered in good.items()
        }
        found.append(max(gains, key=gains.__getitem__))
        left -= good[found[-1]].keys()
    return found


def tokens_at(choice: base.DraftStrategy, acceptance: float, live: float = 1.0) -> float:
    """Compute E[tokens of a row's round] where each first child is right with one probability.

    live: the part of a bucket's rows that live; what rows share is then theirs alone.
    """
    rate = acceptance if choice.chain else widened(acceptance, choice)
    reach = [rate**j for j in range(1, choice.depth + 1)]
    return 1.0 + (spread(reach, choice.share / live - 1) if choice.share else sum(reach))


def spread(reach: Iterable[float], drafts: float) -> float:
    """Compute how many of a row's drafts are right where it has `drafts` of them on average.

    reach: the chance that the draft of each level is right and all before it; rows have one
    before any has two. Choosing the likeliest does better, as far as chances differ.
    """
    total = 0.0
    for chance in reach:
        part = min(max(drafts, 0.0), 1.0)
        total, drafts = total + part * chance, drafts - part
    return total


def widened(rate: float, choice: base.DraftStrategy) -> float:
    """Guess a tree's acceptance from a chain's: of the misses, doubled children leave 0.7.

    Measured on real pairs at widths of 1 to 8: .73, .68 and .65 per doubling.
    """
    return 1 - (1 - rate) * ((choice.nodes - 1) / choice.depth) ** -0.5


def save(path: str | os.PathLike, table: Table) -> None:
    """Write a table as JSON, atomically."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_text(json.dumps(table._asdict(), indent=1) + "\n")
    os.replace(part, path)


def load(path: str | os.PathLike) -> Table | None:
    """Read a table; None if there is none.

    Raises:
      UserError: if the file is not a table.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return None
    try:
        raw = json.loads(path.read_text())
        curves = (
            {int(k): float(v) for k, v in found.items()}
            for found in (raw["forward"], raw["draft"], raw.get("rows", {}))
        )
        table = Table(raw["device"], *curves)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise base.UserError(f"{path} is no cost table ({error}); remove it") from error
    if not table.forward or min((*table.forward.values(), *table.draft.values())) <= 0:
        raise base.UserError(f"{path} holds no positive seconds; remove it")
    return table


def describe(table: Table, rows: Iterable[int], drafters: Iterable[str]) -> str:
    """Lay the table out for reading: ms of a round by bucket and choice, and E that pays."""
    lines = [f"cost table of {table.device}; C_peak {c_peak(table)} tokens"]
    drafters = tuple(drafters)
    for size in rows:
        bucket = base.Bucket(size, 0)
        plain = seconds(table, bucket, base.PLAIN)
        lines.append(f"{size} rows: off {plain * 1e3:.1f} ms")
        for choice in arms(table, size, drafters):
            cost = seconds(table, bucket, choice)
            lines.append(
                f"  {choice!s:<18} {cost * 1e3:8.1f} ms, pays above {cost / plain:.2f} tokens a round"
            )
    return "\n".join(lines)
