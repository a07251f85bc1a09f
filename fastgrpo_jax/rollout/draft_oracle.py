"""A drafter that has seen the answer, to test and to measure with.

It knows the tokens that plain decoding gives, hides each true one in a pseudo-random sibling,
and drops it where a hash says so: with `accept` 0.8 each level is right 8 times in 10. A wrong
cache commit, which a weak drafter would never reach, shows at once under a cheating one.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fastgrpo_jax import base
from fastgrpo_jax.rollout import sampling


class OracleParams(NamedTuple):
    """What the oracle knows: every row's tokens, and how often it tells them."""

    tokens: Int[Array, "N L"]
    accept: Float[Array, ""]


def nodes(depth: int, width: int) -> int:
    """Count the nodes of an oracle's tree: one fan of `width` children per level."""
    return 1 + depth * width


def propose(
    params: OracleParams,
    root: Int[Array, " B"],
    rows: Int[Array, " B"],
    length: Int[Array, " B"],
    strategy: base.DraftStrategy,
    vocab: int,
) -> base.DraftTree:
    """Draft a tree whose levels each hold `width` children of one node of the level above."""
    total, span = params.tokens.shape
    row = jnp.minimum(rows, total - 1)
    depth, width = strategy.depth, strategy.width
    tokens, parents = [root], [jnp.full_like(root, -1)]
    above = jnp.zeros_like(root)
    for d in range(depth):
        at = length + d
        true = params.tokens[row, jnp.minimum(at, span - 1)]
        coin, noise = sampling.threefry(
            row.astype(jnp.uint32), jnp.uint32(7), at.astype(jnp.uint32), jnp.uint32(d)
        )
        tells = (coin >> 8).astype(jnp.float32) * 2.0**-24 < params.accept
        tells &= (at < span) & (true >= 0)
        slot = (noise % jnp.uint32(width)).astype(jnp.int32)
        base_index = 1 + d * width
        for k in range(width):
            other = ((noise >> 3) + jnp.uint32(977 * k)) % jnp.uint32(vocab)
            other = other.astype(jnp.int32)
            other = jnp.where(other == true, (other + 1) % vocab, other)
            tokens.append(jnp.where(tells & (slot == k), true, other))
            parents.append(above)
        above = base_index + slot
    return base.DraftTree(jnp.stack(tokens, axis=1), jnp.stack(parents, axis=1).astype(jnp.int32))
