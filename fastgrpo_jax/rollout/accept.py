"""Verification: walk down the draft tree as long as the target's own draws are in it.

The emitted tokens are the target's draws and nothing else; the tree only decides how many of
them one forward yields. That is the whole proof of losslessness.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fastgrpo_jax import base
from fastgrpo_jax.rollout import tree as tree_lib


def walk(tree: base.DraftTree, draw: Callable, depth: int) -> base.Verdict:
    """Draw the target's token at the node, follow the child that equals it, else stop.

    draw(node [B], depth) gives (token, log-prob, log mass), each [B], for the token that
    follows `node`, whose depth is given.
    """
    node = jnp.zeros_like(tree.tokens[:, 0])
    alive = jnp.ones(node.shape, bool)
    count = jnp.zeros_like(node)
    path = []
    for d in range(depth + 1):
        token, logp, mass = draw(node, d)
        path.append((token, node, logp, mass))
        count += alive
        found, below = tree_lib.child(tree, node, token)
        alive &= found
        node = jnp.where(alive, below, node)
    tokens, nodes, logps, masses = (jnp.stack(x, axis=1) for x in zip(*path))
    return base.Verdict(tokens, nodes, logps, masses, count)


def cut(
    verdict: base.Verdict, stop_tokens: Int[Array, " s"], room: Int[Array, " B"]
) -> tuple[base.Verdict, Bool[Array, " B"]]:
    """End each row's tokens at its first stop token or where its room ends.

    Returns the shortened verdict and which rows met a stop token. A row with no room emits
    nothing. The stop token itself is emitted.
    """
    index = jnp.arange(verdict.tokens.shape[1])
    is_stop = (verdict.tokens[..., None] == stop_tokens).any(-1)
    is_stop &= index < jnp.minimum(verdict.count, room)[:, None]
    stopped = is_stop.any(axis=1)
    end = jnp.where(stopped, jnp.argmax(is_stop, axis=1) + 1, verdict.count)
    count = jnp.minimum(end, room).astype(verdict.count.dtype)
    return verdict._replace(count=count), stopped
