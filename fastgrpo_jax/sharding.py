"""Where arrays lie on several devices: the mesh, and one table of parameters for each layout.

The mesh has three axes. Rows of batches and of rollouts are cut along `data` and `fsdp` together;
in training the parameters and their moments are cut along `fsdp` too, and each layer gathers its
own when it is read. Heads, the feed-forward's units and the vocabulary are cut along `tensor`.
A rollout reads its weights at every token, so its layout gathers `fsdp` once, before it begins.

Axes are Auto: programs say where rows and weights lie, the compiler sees to the rest. Without a
mesh (None: one device) every function here gives back what it was given.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fastgrpo_jax import base

AXES = DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
ROWS = (DATA, FSDP)  # what rows are cut along

Table = tuple[tuple[str, PartitionSpec], ...]

# What a parameter's path ends with, and the axes of its dimensions. The policy's, the drafters',
# and what an optimiser keeps beside the moments, whose paths end like their parameters'.
TRAINING: Table = tuple(
    (name, PartitionSpec(*axes))
    for name, axes in (
        (r"embed|head", (TENSOR, FSDP)),
        (r"attn/[qkv]/kernel", (FSDP, TENSOR)),
        (r"attn/[qkv]/bias", (TENSOR,)),
        (r"attn/o/kernel", (TENSOR, FSDP)),
        (r"(attn/o|fc)/bias", ()),
        (r"(feature_|hidden_)?mlp/(gate|up)/kernel", (FSDP, TENSOR)),
        (r"(feature_|hidden_)?mlp/down/kernel", (TENSOR, FSDP)),
        (r"fuse_(gate|up)/kernel", (FSDP, TENSOR)),
        (r"fuse_down/kernel", (TENSOR, FSDP)),
        (r"(fc|merge)/kernel", (FSDP,)),
        (r"(\w+_)?norm/scale", ()),
        (r"(q|k|v|gate|up)/a", (FSDP,)),  # adapters of LoRA: as their kernels, the rank whole
        (r"(q|k|v|gate|up)/b", (None, TENSOR)),
        (r"(o|down)/a", (TENSOR,)),
        (r"(o|down)/b", (None, FSDP)),
        (r"step|drafter_steps|count|ns_coeffs", ()),
    )
)
ROLLOUT: Table = tuple(
    (name, PartitionSpec(*(None if axis == FSDP else axis for axis in spec)))
    for name, spec in TRAINING
)


def mesh_for(data: int, fsdp: int, tensor: int) -> Mesh | None:
    """Lay the devices out as data x fsdp x tensor; -1, once, takes what is left. One device: None.

    Raises:
      UserError: if the product is not the number of devices.
    """
    sizes, devices = [data, fsdp, tensor], jax.device_count()
    for name, size in zip(AXES, sizes):
        if size < 1 and size != -1:
            raise base.UserError(f"mesh.{name} is {size}; allowed: 1 or more, or -1 for the rest")
    if sizes.count(-1) > 1:
        raise base.UserError(f"mesh.* is {tuple(sizes)}; allowed: -1 for one axis only")
    known = -data * fsdp * tensor if -1 in sizes else data * fsdp * tensor
    if -1 in sizes and devices % known == 0:
        sizes[sizes.index(-1)] = devices // known
    elif known != devices:
        raise base.UserError(
            f"mesh.data x mesh.fsdp x mesh.tensor is {data} x {fsdp} x {tensor}; allowed: a product "
            f"of {devices}, the devices here, or -1 for one axis if the others divide {devices}"
        )
    if devices == 1:
        return None
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def split(mesh: Mesh | None) -> tuple[Mesh, Mesh] | None:
    """Split a mesh along `data` into one for a rollout's last rows and one of the devices that
    they leave idle; the first is the largest part that rows cut for the whole mesh divide into.

    None for what cannot be split: one device or one part, or devices of several processes.
    """
    if mesh is None or mesh.shape[DATA] == 1 or jax.process_count() > 1:
        return None
    count = mesh.shape[DATA]
    kept = max(i for i in range(1, count) if count % i == 0)
    return tuple(Mesh(x, AXES, axis_types=mesh.axis_types) for x in np.split(mesh.devices, [kept]))


def check(
    mesh: Mesh | AbstractMesh | None, policy: base.PolicyConfig, drafter: base.EagleConfig | None
) -> None:
    """Check that a policy and its drafter can be cut.

    Key and value heads need not divide; their projections are then cut through heads.

    Raises:
      UserError: naming the axis, its size and the dimension.
    """
    if mesh is None:
        return
    for part, c in (("model", policy), ("drafter", drafter)):
        if c is None:
            continue
        cut = {
            TENSOR: {"heads": c.heads, "units of the feed-forward": c.ffn,
                     "numbers of a key": c.kv_heads * c.head_dim},
            FSDP: {"hidden dimensions": c.hidden},
        }  # fmt: skip
        if c is policy:
            cut[TENSOR]["ids of the vocabulary"] = c.vocab
        for axis, sizes in cut.items():
            for name, size in sizes.items():
                if size % mesh.shape[axis]:
                    raise base.UserError(
                        f"mesh.{axis} is {mesh.shape[axis]}, but the {part} has {size} {name}; "
                        f"allowed: divisors of {size}"
                    )


def describe(mesh: Mesh | None) -> str:
    """Say what a run is spread over."""
    if mesh is None:
        return "one device"
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    spread = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"mesh {sizes}: {mesh.size} devices{spread} ({mesh.devices.flat[0].device_kind})"


def shards(mesh: Mesh | None) -> int:
    """Count the parts that rows are cut into."""
    return 1 if mesh is None else mesh.shape[DATA] * mesh.shape[FSDP]


def gathers(mesh: Mesh | None) -> bool:
    """Say whether the two layouts differ."""
    return mesh is not None and mesh.shape[FSDP] > 1


# Shardings: where the leaves of a tree are to lie.


def everywhere(mesh: Mesh | None) -> NamedSharding | None:
    """Put an array whole on every device."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def on(mesh: Mesh | AbstractMesh, *axes: str | tuple[str, ...] | None) -> NamedSharding:
    """Cut dimensions along axes. Written as the compiler writes it, without axes of size 1 and
    without what follows the last cut, so that equal shardings compare as equal."""
    found = []
    for axis in axes:
        names = (axis,) if isinstance(axis, str) else axis or ()
        names = tuple(name for name in names if mesh.shape[name] > 1)
        found.append(names[0] if len(names) == 1 else names or None)
    while found and found[-1] is None:
        found.pop()
    return NamedSharding(mesh, PartitionSpec(*found))


def spec_of(path: str, table: Table) -> PartitionSpec:
    """Look up a parameter, such as `layer_0/attn/q/kernel`, or its moments.

    Raises:
      ValueError: if not exactly one row of the table fits it.
    """
    found = [spec for name, spec in table if re.search(rf"(^|/)({name})$", path)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows of the sharding table fit the parameter {path!r}")
    return found[0]


def of_params(mesh: Mesh, tree: Any, table: Table = TRAINING) -> Any:
    """Find the sharding of every leaf of parameters, optimiser states or a `TrainState`."""

    def one(path, _):
        names = (str(getattr(x, "key", getattr(x, "name", getattr(x, "idx", "")))) for x in path)
        return on(mesh, *spec_of("/".join(names), table))

    return jax.tree_util.tree_map_with_path(one, tree)


def of_seats(mesh: Mesh, tree: Any) -> Any:
    """Find the sharding of what each row of a bucket keeps: by rows; keys and values, [B, K, S, H],
    also by heads where they divide."""

    def one(x):
        heads = TENSOR if x.ndim == 4 and x.shape[1] % mesh.shape[TENSOR] == 0 else None
        return on(mesh, ROWS, heads)

    return jax.tree.map(one, tree)


def of_rollout(mesh: Mesh, state: base.RolloutState) -> base.RolloutState:
    """Find the shardings of a rollout: memory by rows, what was said whole, for any row may move."""
    whole = everywhere(mesh)
    return base.RolloutState(
        jax.tree.map(lambda _: whole, state.sequences),
        whole,
        of_seats(mesh, state.cache),
        of_seats(mesh, state.draft),
    )


# Placing, outside of programs.


def put(mesh: Mesh | None, tree: Any) -> Any:
    """Put host arrays on the devices, whole on each."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, tree)
    return _place(tree, jax.tree.map(lambda _: everywhere(mesh), tree))


def put_rows(mesh: Mesh | None, tree: Any) -> Any:
    """Give each device its rows; their number divides by `shards`."""
    if mesh is None:
        return tree
    return _place(tree, jax.tree.map(lambda _: on(mesh, ROWS), tree))


def put_seats(mesh: Mesh | None, tree: Any) -> Any:
    """Give each device its seats, as `of_seats` says."""
    return tree if mesh is None else _place(tree, of_seats(mesh, tree))


def put_params(mesh: Mesh | None, tree: Any) -> Any:
    """Give each device its part of parameters or of a `TrainState`, in the layout of training."""
    return tree if mesh is None else _place(tree, of_params(mesh, tree))


def _place(tree: Any, where: Any) -> Any:
    """Place arrays. Those of the host alone are equal on all processes, and each takes its part."""

    def one(x, sharding):
        if sharding.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
            return jax.device_put(x, sharding)
        x = np.asarray(jnp.asarray(x))  # in one of JAX's types
        return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])

    return jax.tree.map(one, tree, where)


def move_rollout(mesh: Mesh, state: base.RolloutState) -> base.RolloutState:
    """Move a rollout's state to another mesh of this process."""
    return jax.device_put(state, of_rollout(mesh, state))


def narrow(mesh: Mesh, tree: Any) -> Any:
    """Take what lies on some of a mesh's devices, which is all of it: arrays that are cut along
    `tensor` at most. Nothing is copied."""

    def one(x):
        here = {part.device: part.data for part in x.addressable_shards}
        where = NamedSharding(mesh, x.sharding.spec)
        return jax.make_array_from_single_device_arrays(
            x.shape, where, [here[device] for device in mesh.devices.flat]
        )

    return jax.tree.map(one, tree)


def fetch(tree: Any) -> Any:
    """Bring arrays to the host, whole; every process takes part."""

    def one(x):
        if getattr(x, "is_fully_addressable", True) or x.is_fully_replicated:
            return jax.device_get(x)
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(one, tree)


def shapes(mesh: Mesh | None, tree: Any, where: Any = None) -> Any:
    """Describe arrays for ahead-of-time compiling: placed as they are, or as `where` says."""
    if mesh is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    where = jax.tree.map(lambda x: x.sharding, tree) if where is None else where
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where
    )
