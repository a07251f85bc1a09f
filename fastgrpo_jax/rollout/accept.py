"""Verification: walk down the draft tree as long as the target's own draws are in it.

The emitted tokens are the target's draws and nothing else; the tree only decides how many of
them one forward yields. That is the whole proof of losslessness.

`reject` is the usual speculative sampling, to compare with: its tokens have the target's
distribution, but which ones they are depends on the drafter.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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


def reject(
    draft: Int[Array, "B D"],
    weigh: Callable,
    q: Float[Array, "B D V"],
    coins: Float[Array, "B D"],
    noise: Float[Array, "B D1 V"],
) -> base.Verdict:
    """Verify a chain by speculative sampling (Leviathan et al. 2023, arXiv 2211.17192).

    A draft x drawn from q is taken if coin < p(x) / q(x), else the token is drawn from
    norm(max(p - q, 0)) and the row stops; after the last draft it is drawn from p.

    Args:
      draft: -1 is no draft, and its q is 0 everywhere.
      weigh: weigh(d) gives p [B, V] after node d, and record(token) -> (log-prob, log mass).
      noise: Gumbel noise of the tokens that are not drafts, independent of drafts and coins.
    """
    depth = draft.shape[1]
    alive = jnp.ones(draft.shape[:1], bool)
    count = jnp.zeros(draft.shape[:1], jnp.int32)
    path = []
    for d in range(depth + 1):
        p, record = weigh(d)
        taken, rest = jnp.zeros_like(alive), p
        if d < depth:
            x = draft[:, d]
            at = jnp.maximum(x, 0)[:, None]
            px, qx = (jnp.take_along_axis(w, at, axis=1)[:, 0] for w in (p, q[:, d]))
            taken = (x >= 0) & (coins[:, d] * qx < px)
            rest = jnp.maximum(p - q[:, d], 0)
            # p == q leaves nothing, up to rounding, and then the coin cannot have refused.
            rest = jnp.where(rest.sum(axis=1, keepdims=True) > 0, rest, p)
        token = jnp.argmax(jnp.log(rest) + noise[:, d].astype(p.dtype), axis=1).astype(jnp.int32)
        if d < depth:
            token = jnp.where(taken, draft[:, d], token)
        path.append((token, jnp.full_like(token, d), *record(token)))
        count += alive
        alive &= taken
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
