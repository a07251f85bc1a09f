"""Draft trees: who descends from whom, and which nodes of a pool are worth verifying."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fastgrpo_jax import base


def ancestors(parent: Int[Array, "B M"], depth: int) -> Bool[Array, "B M M"]:
    """Mark, for node i, every node j on the way from the root to i, i itself included."""
    nodes = jnp.arange(parent.shape[1])
    seen = jnp.broadcast_to(nodes[:, None] == nodes, (*parent.shape, parent.shape[1]))
    up = parent
    for _ in range(depth):
        seen |= up[:, :, None] == nodes
        up = jnp.take_along_axis(parent, jnp.maximum(up, 0), axis=1)  # the root's stays -1
    return seen


def depths(seen: Bool[Array, "B M M"]) -> Int[Array, "B M"]:
    """Count the steps from the root to each node, given its ancestors."""
    return seen.sum(axis=-1, dtype=jnp.int32) - 1


def child(
    tree: base.DraftTree, node: Int[Array, " B"], token: Int[Array, " B"]
) -> tuple[Bool[Array, " B"], Int[Array, " B"]]:
    """Find the first child of each row's node that carries the token: (is there one, which)."""
    match = (tree.parent == node[:, None]) & (tree.tokens == token[:, None])
    return match.any(axis=1), jnp.argmax(match, axis=1).astype(jnp.int32)


def chain(root: Int[Array, " B"], tokens: Int[Array, "B D"]) -> base.DraftTree:
    """Make the tree in which every node has one child."""
    rows, depth = tokens.shape
    parent = jnp.broadcast_to(jnp.arange(-1, depth, dtype=jnp.int32), (rows, depth + 1))
    return base.DraftTree(jnp.concatenate([root[:, None], tokens], axis=1), parent)


def prune(
    root: Int[Array, " B"],
    tokens: Int[Array, "B C"],
    scores: Float[Array, "B C"],
    parent: Int[Array, "B C"],
    keep: int,
) -> base.DraftTree:
    """Keep the root and the `keep` best candidates of a pool.

    A candidate's parent is an earlier one, or -1 for the root, and its score is not above its
    parent's; ties go to the earlier, so whatever is kept has its parent kept.
    """
    _, best = jax.lax.top_k(scores, keep)
    best = jnp.sort(best, axis=1)
    above = jnp.take_along_axis(parent, best, axis=1)
    at = jnp.argmax(best[:, None, :] == above[:, :, None], axis=2).astype(jnp.int32) + 1
    at = jnp.where(above < 0, 0, at)
    head = jnp.full_like(root, -1)[:, None]
    return base.DraftTree(
        jnp.concatenate([root[:, None], jnp.take_along_axis(tokens, best, axis=1)], axis=1),
        jnp.concatenate([head, at], axis=1),
    )
