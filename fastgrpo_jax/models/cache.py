"""Operations on a `KVCache`: write, move, choose rows, grow.

Writes beyond the last slot are dropped, never clamped back over valid slots (which is what
`dynamic_update_slice` would do). The bucket guarantees that a live row's writes fit.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fastgrpo_jax import base, spmd


def init(layers: int, rows: int, kv_heads: int, slots: int, head_dim: int, dtype) -> base.KVCache:
    """Make an empty cache."""
    shape = (rows, kv_heads, slots, head_dim)
    return base.KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        v=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
    )


def write(
    slots: Float[Array, "B K S H"], new: Float[Array, "B K T H"], start: Int[Array, " B"]
) -> Float[Array, "B K S H"]:
    """Write T entries of each row at its own `start`."""

    def one(row, entries, at):
        return row.at[:, at + jnp.arange(entries.shape[1])].set(
            entries.astype(row.dtype), mode="drop", unique_indices=True, indices_are_sorted=True
        )

    return jax.vmap(one)(slots, new, start)


def move(cache: base.KVCache, start: Int[Array, " B"], nodes: Int[Array, "B D1"]) -> base.KVCache:
    """Move slot start + nodes[i] to slot start + i, for every i: the accepted path of a tree."""

    def one(row, at, path):
        return jnp.take(row, at + path, axis=1, mode="clip")

    def shift(slots):
        return write(slots, jax.vmap(one)(slots, start, nodes), start)

    return jax.tree.map(shift, cache)


def resize(
    cache: base.KVCache, rows: Int[Array, " C"], slots: int, mesh: Any = None
) -> base.KVCache:
    """Take the given rows (any index out of range gives zeros) and cut or pad to `slots`."""

    def fit(x):
        x = x[:, :, :slots]
        return jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0)))

    return jax.tree.map(fit, spmd.take(mesh, cache, rows))
