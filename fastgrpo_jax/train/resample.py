"""Bounded dynamic sampling (DAPO, arXiv 2503.14476): groups that teach nothing are replaced.

A group whose rewards are all equal has no advantages. Further prompts of the data stream are
answered in rounds of the usual size, so that nothing new is compiled, and their groups take the
places of such ones. The number of rounds is bounded; groups that still lack a substitute stay.
"""

import numpy as np
from jaxtyping import Bool, Float

from fastgrpo_jax.train import grpo


def informative(rewards: Float[np.ndarray, "K G"]) -> Bool[np.ndarray, " K"]:
    """Say which groups have scores that differ."""
    return grpo.group_std(rewards) > 0


def choose(teaches: Bool[np.ndarray, " K"], count: int) -> list[int]:
    """Choose `count` of K groups, in the order of the stream, given which are informative.

    The first `count` stay in their places, but for those that teach nothing, each of which
    gives way to the next later one that does, while there are any.
    """
    later = iter([i for i in range(count, len(teaches)) if teaches[i]])
    return [i if teaches[i] else next(later, i) for i in range(count)]
