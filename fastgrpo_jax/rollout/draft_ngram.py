"""The n-gram drafter: continue the longest recent match of the row's own suffix.

Matches are sought in the row's own tokens, in its siblings', which answer the same prompt, and
in what was answered to the prompt before.
One vectorised compare on device, no index to keep; a chain of fixed length comes out, so the
rows' differing matches need no program of their own.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from fastgrpo_jax import base


class Earlier(NamedTuple):
    """E earlier answers to each of P prompts, newest first, each behind its prompt's end."""

    tokens: Int[Array, "P E L"]
    length: Int[Array, "P E"]


def propose(
    sequences: base.Sequences,
    rows: Int[Array, " B"],
    group: int,
    depth: int,
    longest: int,
    earlier: Earlier | None = None,
) -> tuple[Int[Array, "B D"], Int[Array, " B"]]:
    """Propose `depth` tokens per row; -1 (never accepted) where nothing matches or is known.

    Also returns how many tokens the match has.

    The longest match of at most `longest` tokens wins; of equal ones the row's own before a
    sibling's before an earlier answer's, and the latest of these.
    """
    total, span = sequences.tokens.shape
    row = jnp.minimum(rows, total - 1)
    length = sequences.length[row]
    member = (row // group * group)[:, None] + jnp.arange(group)  # [B, G]
    corpus = sequences.tokens[member]  # [B, G, L]
    known = sequences.length[member]  # [B, G]
    near = 1 + (member == row[:, None])
    if earlier is not None:
        corpus = jnp.concatenate([corpus, earlier.tokens[row // group]], axis=1)
        known = jnp.concatenate([known, earlier.length[row // group]], axis=1)
        near = jnp.pad(near, ((0, 0), (0, earlier.length.shape[1])))

    place = jnp.arange(span)
    follows = place + 1 < known[..., None]  # a match must end before the last known token
    matched = jnp.zeros(corpus.shape, jnp.int32)
    going = follows
    for back in range(longest):
        at = length - 1 - back
        wanted = jnp.take_along_axis(
            sequences.tokens[row], jnp.maximum(at, 0)[:, None], axis=1
        )  # [B, 1]
        shifted = jnp.roll(corpus, back, axis=2)
        going &= (shifted == wanted[:, None]) & (place >= back) & (at >= 0)[:, None, None]
        matched += going
    rank = (matched * 3 + near[..., None]) * span + place
    rank = jnp.where(matched > 0, rank, -1).reshape(rows.shape[0], -1)
    best = jnp.argmax(rank, axis=1)
    hit = jnp.max(rank, axis=1) >= 0
    source, end = best // span, best % span
    at = end[:, None] + 1 + jnp.arange(depth)
    flat = corpus.reshape(rows.shape[0], -1)
    tokens = jnp.take_along_axis(flat, source[:, None] * span + jnp.minimum(at, span - 1), axis=1)
    valid = hit[:, None] & (at < jnp.take_along_axis(known, source[:, None], axis=1))
    length = jnp.take_along_axis(matched.reshape(rows.shape[0], -1), best[:, None], axis=1)[:, 0]
    return jnp.where(valid, tokens, -1).astype(jnp.int32), length.astype(jnp.int32)
