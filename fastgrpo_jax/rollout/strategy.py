"""Controllers: which draft strategy a bucket gets. Pure functions of what they are given."""

import math
from collections.abc import Callable
from typing import NamedTuple

from fastgrpo_jax import base

DRAFTERS = ("off", "learned", "ngram", "oracle")


class Controller(NamedTuple):
    """A rule for choosing strategies.

    choose(rows, block): the strategy of the next block, given the bucket's rows and the number
      of blocks decoded so far.
    possible(rows): every strategy that it may choose there, for the list of programs.
    """

    name: str
    choose: Callable[[int, int], base.DraftStrategy]
    possible: Callable[[int], tuple[base.DraftStrategy, ...]]


def parse(text: str) -> base.DraftStrategy:
    """Read `off` or `drafter:depth:width:nodes`.

    Raises:
      UserError: if it is neither, or the numbers do not make a tree.
    """
    if text == "off":
        return base.PLAIN
    parts = text.split(":")
    numbers = all(p.isascii() and p.isdigit() for p in parts[1:])
    if len(parts) != 4 or parts[0] not in DRAFTERS[1:] or not numbers:
        raise base.UserError(
            f"strategy is {text!r}; allowed: off, or drafter:depth:width:nodes with a drafter of "
            f"{', '.join(DRAFTERS[1:])}, e.g. learned:3:2:6"
        )
    if int(parts[1]) < 1:
        raise base.UserError(f"strategy is {text!r}; depth must be 1 or more, or say off")
    strategy = base.DraftStrategy(parts[0], *map(int, parts[1:]))
    if strategy.drafter == "oracle" and strategy.nodes != 1 + strategy.depth * strategy.width:
        raise base.UserError(
            f"strategy is {text!r}; the oracle fans out at every level: its nodes are "
            f"1 + depth * width = {1 + strategy.depth * strategy.width}"
        )
    if strategy.drafter == "ngram" and not strategy.chain:
        raise base.UserError(f"strategy is {text!r}; the n-gram drafter makes chains: width 1")
    return strategy


def constant(name: str, strategy: base.DraftStrategy) -> Controller:
    """Make the controller that always chooses one strategy (`off` and `fixed`)."""
    return Controller(name, lambda rows, block: strategy, lambda rows: (strategy,))


def cycle(strategies: tuple[base.DraftStrategy, ...]) -> Controller:
    """Make the controller that changes strategy at every block, to test switching."""
    return Controller(
        "cycle",
        lambda rows, block: strategies[block % len(strategies)],
        lambda rows: tuple(dict.fromkeys(strategies)),
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

    def rule(rows):
        return fastgrpo_strategy(rows, c_peak, **limits)

    return Controller("fastgrpo", lambda rows, block: rule(rows), lambda rows: (rule(rows),))


def knee(tokens_per_second: dict[int, float]) -> int:
    """Read C_peak off a throughput curve: the smallest batch with 95 % of the best tokens/s."""
    best = max(tokens_per_second.values())
    return min(rows for rows, rate in tokens_per_second.items() if rate >= 0.95 * best)
