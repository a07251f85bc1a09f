"""Inside of programs: how arrays are to lie, and what each device computes on its own rows.

Without a mesh (None: one device) every function here gives back, or computes, what one device does.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fastgrpo_jax import base, sharding


def whole(mesh: Mesh | None, tree: Any) -> Any:
    """Ask for arrays whole on every device."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, sharding.everywhere(mesh))


def rows(mesh: Mesh | None, tree: Any) -> Any:
    """Ask for arrays cut by rows; what does not divide is left to the compiler."""
    if mesh is None or _alone():
        return tree

    def one(x):
        if x.shape[0] % sharding.shards(mesh):
            return x
        return jax.lax.with_sharding_constraint(x, sharding.on(mesh, sharding.ROWS))

    return jax.tree.map(one, tree)


def heads(mesh: Mesh | None, x: jax.Array) -> jax.Array:
    """Ask for queries, keys or values [B, K, ...] to be cut as the cache is: by heads, or, where
    they do not divide, not at all, lest what is cut be gathered for the cache in every round."""
    near = jax.sharding.get_abstract_mesh()
    if mesh is None and not near.manual_axes:
        return x
    mesh = near if near.manual_axes else mesh
    cut = None if near.manual_axes or x.shape[0] % sharding.shards(mesh) else sharding.ROWS
    each = sharding.TENSOR if x.shape[1] % mesh.shape[sharding.TENSOR] == 0 else None
    return jax.lax.with_sharding_constraint(x, sharding.on(mesh, cut, each))


def seats(mesh: Mesh | None, tree: Any) -> Any:
    """Ask for what each row of a bucket keeps to lie `of_seats`."""
    return tree if mesh is None else _constrain(tree, sharding.of_seats(mesh, tree))


def rollout(mesh: Mesh | None, state: base.RolloutState) -> base.RolloutState:
    """Ask for a rollout's state to lie `of_rollout`."""
    return state if mesh is None else _constrain(state, sharding.of_rollout(mesh, state))


def gathered(mesh: Mesh | None, params: Any) -> Any:
    """Ask for parameters in the layout of the rollout."""
    if mesh is None or _alone():
        return params
    return _constrain(params, sharding.of_params(mesh, params, sharding.ROLLOUT))


def trained(mesh: Mesh | None, state: Any) -> Any:
    """Ask for parameters, their gradients or a `TrainState` in the layout of training."""
    return state if mesh is None else _constrain(state, sharding.of_params(mesh, state))


def _constrain(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def parts(mesh: Mesh | None, tree: Any, count: int) -> Any:
    """Cut N rows into `count` parts, [count, N / count, ...]; every part has rows of every device."""
    cut = sharding.shards(mesh)

    def one(x):
        if cut == 1:
            return x.reshape(count, x.shape[0] // count, *x.shape[1:])
        x = x.reshape(cut, count, -1, *x.shape[1:]).swapaxes(0, 1)
        x = x.reshape(count, -1, *x.shape[3:])
        return jax.lax.with_sharding_constraint(x, sharding.on(mesh, None, sharding.ROWS))

    return jax.tree.map(one, tree)


def unparts(mesh: Mesh | None, x: jax.Array) -> jax.Array:
    """Undo `parts`: [count, N / count, ...] to [N, ...]."""
    if sharding.shards(mesh) > 1:
        x = x.reshape(x.shape[0], sharding.shards(mesh), -1, *x.shape[2:]).swapaxes(0, 1)
        return rows(mesh, x.reshape(-1, *x.shape[3:]))
    return x.reshape(-1, *x.shape[2:])


# Programs of which every device runs its own.


def _alone() -> bool:
    """Say whether this is traced `by_rows`: then rows are a device's own already."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def by_rows(mesh: Mesh | None, function: Callable, shared: Any, own: Any) -> Any:
    """Compute function(shared, own) on each device's rows of `own`; results are rows as well.

    So a loop over chunks of rows stays on a device, and the gradient of `shared` is summed over
    devices once, not in every chunk. `shared` may still be cut along `tensor`.
    """
    if mesh is None:
        return function(shared, own)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(sharding.ROWS)),
        out_specs=PartitionSpec(sharding.ROWS),
        axis_names=set(sharding.ROWS),
        check_vma=False,  # loops inside begin with constants, which do not vary yet
    )(shared, own)


def concatenate(mesh: Mesh | None, trees: tuple) -> Any:
    """Join rows of several trees, on each device its own: all of one device's come first."""

    def own(_, mine):
        return jax.tree.map(lambda *x: jnp.concatenate(x), *mine)

    return by_rows(mesh, own, (), trees)


def take(mesh: Mesh | None, tree: Any, index: jax.Array) -> Any:
    """Take rows of arrays; an index beyond the last gives zeros. Row i may come from another device.

    The devices' rows go round in a ring and each device keeps what it wants of those that come
    by, so that none ever holds more than twice its own.
    """
    cut = sharding.shards(mesh)
    if cut == 1:
        return jax.tree.map(lambda x: jnp.take(x, index, axis=0, mode="fill", fill_value=0), tree)
    ring = [(i, (i - 1) % cut) for i in range(cut)]

    def own(index, mine):
        count = index.shape[0] // cut
        me = jax.lax.axis_index(sharding.ROWS)
        index = jax.lax.dynamic_slice_in_dim(index, me * count, count)

        def look(i, carry):
            visitor, found = carry

            def keep(x, kept):
                at = index - (me + i) % cut * x.shape[0]
                hit = ((at >= 0) & (at < x.shape[0])).reshape(-1, *[1] * (x.ndim - 1))
                return jnp.where(hit, jnp.take(x, at, axis=0, mode="clip"), kept)

            found = jax.tree.map(keep, visitor, found)
            return jax.lax.ppermute(visitor, sharding.ROWS, ring), found

        nothing = jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), mine)
        return jax.lax.fori_loop(0, cut, look, (mine, nothing))[1]

    return by_rows(mesh, own, index, tree)


def by_heads(mesh: Mesh | None, function: Callable, heads: tuple, mask: Any) -> Any:
    """Compute function(*heads, mask) on each device's rows [B, ...] and heads [B, K, ...].

    For a kernel, which the compiler cannot cut. What does not divide is done by every device.
    """
    if mesh is None:
        return function(*heads, mask)
    count, kv = heads[0].shape[:2]
    cut = None if _alone() or count % sharding.shards(mesh) else sharding.ROWS
    each = PartitionSpec(cut, None if kv % mesh.shape[sharding.TENSOR] else sharding.TENSOR)
    return jax.shard_map(
        function,
        mesh=None if _alone() else mesh,
        in_specs=(*[each] * len(heads), PartitionSpec(cut)),
        out_specs=each,
        axis_names={sharding.TENSOR} if _alone() else set(sharding.AXES),
        check_vma=False,  # a kernel does not say how its result varies
    )(*heads, mask)
