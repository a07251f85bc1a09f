"""The draft vocabulary: the ids that a learned drafter may propose.

A small model's drafting costs mostly its head, so the drafter proposes the ids that were seen
most; the rest can only be emitted by the target itself. The noise of an id is addressed by the
id, so a smaller vocabulary changes no token that the target draws.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fastgrpo_jax import base


def count(rows: Iterable[Iterable[int]], seen: Mapping[str, int] | None = None) -> dict[str, int]:
    """Add the ids of some rows to the counts; keys are the ids' digits, as JSON has them."""
    counts = Counter(seen or {})
    for row in rows:
        counts.update(map(str, map(int, row)))
    return dict(counts)


def rank(
    counts: Mapping[str, int], size: int, vocab: int, always: Iterable[int] = ()
) -> Int[np.ndarray, " W"]:
    """Choose the `size` most frequent ids, ascending; `always` are among them.

    Ids that were not seen follow in their own order, which is about that of frequency where the
    ids are those of byte-pair merges.
    """
    order = np.zeros(vocab, np.int64)
    for text, n in counts.items():
        order[int(text)] = n
    order[list(always)] = np.iinfo(np.int64).max
    best = np.lexsort((np.arange(vocab), -order))[:size]
    return np.sort(best).astype(np.int32)


def check(size: int, choices: Iterable[base.DraftStrategy], name: str) -> None:
    """Refuse a draft vocabulary (0: all ids) smaller than the children that a node may get.

    Raises:
      UserError: naming the setting, its value and the strategy.
    """
    for choice in choices:
        if choice.drafter == "learned" and 0 < size < choice.width:
            raise base.UserError(
                f"{name} is {size}, but {choice} drafts {choice.width} children of a node; "
                f"allowed: 0 (all ids), or {choice.width} and more"
            )


def coverage(ids: Int[np.ndarray, " W"], rows: Iterable[Iterable[int]]) -> float:
    """Compute the share of emitted ids that could have been proposed; NaN without any."""
    emitted = np.concatenate([np.asarray(list(row), np.int64) for row in rows] or [[]])
    return float(np.isin(emitted, ids).mean()) if len(emitted) else float("nan")


def head(table: Float[Array, "V E"], ids: Int[Array, " W"]) -> Float[Array, "W E"]:
    """Take the rows of the target's head that belong to the ids."""
    return jnp.take(table, ids, axis=0)
