"""Controllers: which draft strategy a bucket gets. Pure functions of what they are given.

A controller carries no state of its own: what it has seen is its `Memory`, a nested dict of
plain numbers that a checkpoint keeps as JSON, so that a resumed run decides as one that was
never stopped.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from fastgrpo_jax import base

DEEPEST, MOST_NODES = 32, 1024  # each level is a part of the compiled program
DRAFTERS = ("off", "learned", "ngram", "oracle")


Memory = dict[str, Any]  # JSON values only


class Situation(NamedTuple):
    """What a controller sees before a block: the bucket it runs in, and the rows that live."""

    bucket: base.Bucket
    live: int
    block: int  # blocks decoded so far in this rollout


class Choice(NamedTuple):
    """A strategy, and for at most how many rounds."""

    strategy: base.DraftStrategy
    rounds: int


class Outcome(NamedTuple):
    """What came of a block; counts are over its live rows, those of drafts by depth.

    seconds: wall time of the block; NaN if its program was compiled for it.
    """

    situation: Situation
    strategy: base.DraftStrategy
    rounds: int
    row_rounds: int
    emitted: int
    accepted: tuple[int, ...]
    tried: tuple[int, ...]
    seconds: float


def _forget_nothing(memory: Memory, *_) -> Memory:
    return memory


class Controller(NamedTuple):
    """A rule for choosing strategies.

    possible(rows): every strategy that it may choose in a bucket of so many rows.
    choose(memory, situation, rounds): the next block, of at most `rounds` rounds.
    observe(memory, outcome): the memory after a block.
    renew(memory): the memory after the weights changed, so that what was seen counts less.
    """

    name: str
    possible: Callable[[int], tuple[base.DraftStrategy, ...]]
    choose: Callable[[Memory, Situation, int], Choice]
    observe: Callable[[Memory, Outcome], Memory] = _forget_nothing
    renew: Callable[[Memory], Memory] = _forget_nothing


def by_rows(name: str, rule: Callable[[int], base.DraftStrategy]) -> Controller:
    """Make the controller that goes by the bucket's rows alone."""
    return Controller(
        name,
        lambda rows: (rule(rows),),
        lambda memory, now, rounds: Choice(rule(now.bucket.rows), rounds),
    )


def parse(text: str) -> base.DraftStrategy:
    """Read `off` or `drafter:depth:width:nodes`.

    Raises:
      UserError: if it is neither, or the numbers do not make a tree.
    """
    if text == "off":
        return base.PLAIN
    chain, _, share = text.partition("@")
    parts = chain.split(":")
    numbers = all(p.isascii() and p.isdigit() for p in parts[1:])
    if len(parts) != 4 or parts[0] not in DRAFTERS[1:] or not numbers:
        raise base.UserError(
            f"strategy is {text!r}; allowed: off, or drafter:depth:width:nodes with a drafter of "
            f"{', '.join(DRAFTERS[1:])}, e.g. learned:3:2:6, or a chain with a share of its nodes, "
            "e.g. learned:3:1:4@1.5"
        )
    if "@" in text and not _decimal(share):
        raise base.UserError(
            f"strategy is {text!r}; after the @ stands how many nodes of a row are verified on "
            "average, e.g. learned:3:1:4@1.5"
        )
    if int(parts[1]) < 1:
        raise base.UserError(f"strategy is {text!r}; depth must be 1 or more, or say off")
    if int(parts[1]) > DEEPEST or int(parts[3]) > MOST_NODES:
        raise base.UserError(
            f"strategy is {text!r}; depth may be {DEEPEST} at most, nodes {MOST_NODES}"
        )
    strategy = base.DraftStrategy(parts[0], *map(int, parts[1:]), float(share or 0))
    if "@" in text and not strategy.share:
        raise base.UserError(f"strategy is {text!r}; a share must lie above 1")
    if strategy.drafter == "oracle" and strategy.nodes != 1 + strategy.depth * strategy.width:
        raise base.UserError(
            f"strategy is {text!r}; the oracle fans out at every level: its nodes are "
            f"1 + depth * width = {1 + strategy.depth * strategy.width}"
        )
    if strategy.drafter == "ngram" and not strategy.chain:
        raise base.UserError(f"strategy is {text!r}; the n-gram drafter makes chains: width 1")
    return strategy


def _decimal(text: str) -> bool:
    return text.isascii() and text.replace(".", "", 1).isdigit()


def constant(name: str, strategy: base.DraftStrategy) -> Controller:
    """Make the controller that always chooses one strategy (`off` and `fixed`)."""
    return by_rows(name, lambda rows: strategy)


def cycle(strategies: tuple[base.DraftStrategy, ...]) -> Controller:
    """Make the controller that changes strategy at every block, to test switching."""
    return Controller(
        "cycle",
        lambda rows: tuple(dict.fromkeys(strategies)),
        lambda memory, now, rounds: Choice(strategies[now.block % len(strategies)], rounds),
    )


def fastgrpo_strategy(
    rows: int,
    c_peak: int,
    *,
    n_max: int,
    depth_max: int,
    width_max: int,
    alpha: float,
    drafter: str,
) -> base.DraftStrategy:
    """Apply FastGRPO's concurrency rule (arXiv 2509.21792) to a number of live rows.

        N = min(floor(c_peak / rows), n_max)       tokens verified per row, root included
        L = clip(floor(log2(N / alpha)), 1, depth_max), at most N - 1
        K = min(N - 1, width_max)

    Below N = 2 it decodes plainly, and L has no lower clamp at 3: the released code would
    draft levels that nobody verifies. The n-gram drafter gets a chain of N - 1 instead.
    """
    nodes = min(c_peak // rows, n_max)
    if nodes < 2:
        return base.PLAIN
    if drafter == "ngram":
        depth = min(nodes - 1, depth_max)
        return base.DraftStrategy(drafter, depth, 1, depth + 1)
    depth = min(max(math.floor(math.log2(nodes / alpha)), 1), depth_max, nodes - 1)
    width = min(nodes - 1, width_max)
    pool = width + width**2 * (depth - 1)
    return base.DraftStrategy(drafter, depth, width, min(nodes, pool + 1))


def fastgrpo(c_peak: int, **limits) -> Controller:
    """Make FastGRPO's controller; `limits` are those of `fastgrpo_strategy`."""
    return by_rows("fastgrpo", lambda rows: fastgrpo_strategy(rows, c_peak, **limits))


def knee(tokens_per_second: dict[int, float]) -> int:
    """Read C_peak off a throughput curve: the smallest batch with 95 % of the best tokens/s."""
    best = max(tokens_per_second.values())
    return min(rows for rows, rate in tokens_per_second.items() if rate >= 0.95 * best)
