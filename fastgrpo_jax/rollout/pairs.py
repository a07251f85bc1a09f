"""Ways to draft K children of one node, compared on distributions p and q (for `bench`)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from fastgrpo_jax.rollout import sampling


def greedy(
    p: Float[Array, "n V"], q: Float[Array, "n V"], widths: tuple[int, ...]
) -> Float[Array, "n w"]:
    """Compute the target's mass on the K likeliest ids of q, for each K."""
    ids = sampling.top(q, max(widths))[1]
    mass = jnp.cumsum(jnp.take_along_axis(p, ids, axis=1), axis=1)
    return mass[:, jnp.asarray(widths) - 1]


def shared_noise(
    p: Float[Array, "n V"],
    q: Float[Array, "n V"],
    noise: Float[Array, "n V"],
    widths: tuple[int, ...],
) -> Float[Array, "n w"]:
    """Say whether argmax(log p + G) is among the K best of log q + G, for each K."""
    token = sampling.top(jnp.log(p) + noise, 1)[1]
    ids = sampling.top(jnp.log(q) + noise, max(widths))[1]
    hit = jnp.cumsum(ids == token, axis=1)
    return hit[:, jnp.asarray(widths) - 1].astype(jnp.float32)


def rejection(
    p: Float[Array, "n V"],
    q: Float[Array, "n V"],
    noise: Float[Array, "n V"],
    widths: tuple[int, ...],
) -> Float[Array, "n w"]:
    """Compute the chance that one of K draws from q is accepted (SpecInfer, arXiv 2305.09781).

    The K draws without replacement are the K best of log q + noise. Draw x is accepted with
    min(1, p(x) / q(x)); else p becomes norm(max(p - q, 0)) and q loses x. The
    coins are averaged over.
    """
    ids = sampling.top(jnp.log(q) + noise, max(widths))[1]
    going = jnp.ones(p.shape[0], p.dtype)
    total = jnp.zeros(p.shape[0], p.dtype)
    found = []
    for k in range(max(widths)):
        x = ids[:, k : k + 1]
        px, qx = (jnp.take_along_axis(d, x, axis=1)[:, 0] for d in (p, q))
        accept = jnp.minimum(1.0, px / jnp.maximum(qx, 1e-30))
        total, going = total + going * accept, going * (1 - accept)
        found.append(total)
        p = _norm(jnp.maximum(p - q, 0))
        q = _norm(q.at[jnp.arange(q.shape[0]), x[:, 0]].set(0))
    return jnp.stack(found, axis=1)[:, jnp.asarray(widths) - 1]


def _norm(x):
    return x / jnp.maximum(x.sum(-1, keepdims=True), 1e-30)


def compare(
    p: Float[Array, "n V"],
    q: Float[Array, "n V"],
    ids: UInt[Array, " n"],
    widths: tuple[int, ...],
    draws: int,
) -> dict[str, Float[Array, "*n"]]:
    """Compute entropy and total variation [n], and the three acceptances [n, widths]."""
    vocab = jnp.arange(p.shape[1], dtype=jnp.int32)

    def noise(stream) -> Float[Array, "n V"]:
        key = jnp.stack([ids, jnp.full_like(ids, stream)], axis=1)
        return sampling.gumbel(key, jnp.zeros(ids.shape, jnp.int32), vocab)

    def one(total, i):
        new = (
            shared_noise(p, q, noise(2 * i), widths),
            rejection(p, q, noise(2 * i + 1), widths),
        )
        return jax.tree.map(jnp.add, total, new), None

    zero = jnp.zeros((p.shape[0], len(widths)), jnp.float32)
    (shared, rejected), _ = jax.lax.scan(one, (zero, zero), jnp.arange(draws, dtype=jnp.uint32))
    return {
        "entropy": -jnp.sum(p * jnp.log(jnp.maximum(p, 1e-30)), axis=1),
        "tv": 0.5 * jnp.abs(p - q).sum(axis=1),
        "greedy": greedy(p, q, widths),
        "shared_noise": shared / draws,
        "rejection": rejected / draws,
    }
