"""TLT's selector, BEG-MAB: a bucketed epsilon-greedy bandit (arXiv 2511.16665).

The reward of a block is the tokens it emitted per second. Each bucket keeps a window of rewards
per choice and takes the choice with the largest median; untried ones come first; with
probability epsilon it takes any. Unlike the released defaults, every bucket has at least two
choices (plain decoding is always one), and windows shrink when the weights change.
"""

import statistics
from collections.abc import Callable, Sequence

from fastgrpo_jax import base
from fastgrpo_jax.rollout import strategy

THRESHOLDS = (1, 2, 5, 21)  # most rows of each group of strategies, as released


def by_tokens(
    strategies: Sequence[base.DraftStrategy], thresholds: Sequence[int] = THRESHOLDS
) -> Callable[[int], tuple[base.DraftStrategy, ...]]:
    """Group strategies by the tokens they verify, the largest for the fewest rows.

    The i-th group serves buckets of at most thresholds[i] rows; what is beyond either list goes
    to its last.
    """
    sizes = sorted({s.nodes for s in strategies}, reverse=True)
    groups = [tuple(s for s in strategies if s.nodes == size) for size in sizes]

    def arms(rows: int) -> tuple[base.DraftStrategy, ...]:
        place = sum(rows > limit for limit in thresholds)
        return groups[min(place, len(groups) - 1)] if groups else ()

    return arms


def controller(
    arms: Callable[[int], Sequence[base.DraftStrategy]],
    *,
    epsilon: float = 0.1,
    window: int = 300,
    keep: float = 0.5,
    cost: Callable[[base.Bucket, base.DraftStrategy], float] | None = None,
) -> strategy.Controller:
    """Make the controller; `arms(rows)` are a bucket's choices, plain decoding added.

    keep: share of a window that survives an update of the weights.
    cost: seconds of a round to reckon with in place of the clock (frozen timing).
    """

    def possible(rows: int) -> tuple[base.DraftStrategy, ...]:
        return tuple(dict.fromkeys((*arms(rows), base.PLAIN)))

    def choose(memory, now, rounds) -> strategy.Choice:
        choices, turn = possible(now.bucket.rows), memory.get("turn", 0)
        if _uniform(turn, 0) < epsilon:
            return strategy.Choice(choices[int(_uniform(turn, 1) * len(choices))], rounds)
        seen = memory.get("rewards", {})

        def worth(choice):
            rewards = seen.get(_key(now.bucket.rows, choice))
            return statistics.median(rewards) if rewards else float("inf")

        return strategy.Choice(max(choices, key=worth), rounds)

    def observe(memory, outcome) -> strategy.Memory:
        memory = memory | {"turn": memory.get("turn", 0) + 1}
        bucket, choice = outcome.situation.bucket, outcome.strategy
        seconds = outcome.seconds
        if cost is not None:
            seconds = cost(bucket, choice) * outcome.rounds
        if not outcome.rounds or not seconds > 0:  # NaN: the program's first run
            return memory
        rewards, key = memory.get("rewards", {}), _key(bucket.rows, choice)
        rate = outcome.emitted / outcome.row_rounds * outcome.situation.live
        reward = rate * outcome.rounds / seconds
        return memory | {"rewards": rewards | {key: [*rewards.get(key, ()), reward][-window:]}}

    def renew(memory) -> strategy.Memory:
        rewards = memory.get("rewards", {})
        kept = {key: values[-max(int(len(values) * keep), 1) :] for key, values in rewards.items()}
        return memory | {"rewards": kept}

    return strategy.Controller("beg_mab", possible, choose, observe, renew)


def _key(rows: int, choice: base.DraftStrategy) -> str:
    return f"{rows}/{choice}"


def _uniform(turn: int, stream: int) -> float:
    """Hash a turn to [0, 1): the same on every host and after a resume (splitmix64)."""
    x = (2 * turn + stream + 1) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) / 2**64
