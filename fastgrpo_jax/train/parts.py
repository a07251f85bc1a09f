"""Parts of a step's batch that are run one after another; their gradients add up to the batch's.

The weights of tokens are those of the whole batch, so it does not matter how it is cut. `grad`
gives (gradients, terms) of a batch's sequences; terms are scalars, which add up, and what is
known of each token, [N, ...], where masked tokens have 0.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fastgrpo_jax import base, sharding, spmd
from fastgrpo_jax.train import layout
from fastgrpo_jax.train.layout import Places, StepBatch


def sum_micro_batches(
    grad: Callable, batch: StepBatch, places: Places, parts: int, mesh: Any = None
):
    """Call grad(batch, places) for as many equal parts of the rows, each with rows of every device.

    Raises:
      base.UserError: the rows do not divide into them.
    """
    count = batch.tokens.shape[0]
    if count % parts:
        raise base.UserError(
            f"optim.micro_batches is {parts}, but a step has {count} rows; allowed: divisors of {count}"
        )
    if parts == 1:
        grads, terms = grad(batch, places)
        return spmd.trained(mesh, grads), terms
    ids, rows = batch.draft_ids, batch._replace(draft_ids=None)

    def one(part):
        rows, places = part
        return grad(rows._replace(draft_ids=ids), places)

    def accumulate(total, part):
        grads, terms = one(part)
        return spmd.trained(mesh, jax.tree.map(jnp.add, total, grads)), terms

    def join(x):
        return jnp.sum(x) if x.ndim == 1 else spmd.unparts(mesh, x)

    split_rows = spmd.parts(mesh, (rows, places), parts)
    first = jax.tree.map(lambda x: x[0], split_rows)
    grads, terms = jax.lax.scan(accumulate, _nothing(one, first)[0], split_rows)
    return grads, jax.tree.map(join, terms)


def sum_bins(
    grad: Callable,
    batch: StepBatch,
    places: Places,
    group: int,
    micro_batches: int,
    mesh: Any = None,
):
    """Call grad(batch, places, rows) for the bins that are filled, one for each device at a time.

    No gradient is taken through this loop, so how long it is may depend on the batch.

    Raises:
      base.UserError: micro-batches are asked for too.
    """
    if micro_batches > 1:
        raise base.UserError(
            f"optim.micro_batches is {micro_batches}; allowed: 1 with optim.token_budget, whose "
            "bins are run one by one already"
        )

    devices = sharding.shards(mesh)

    def one(turn):
        first = turn * devices
        inside = (batch.packed.bin >= first) & (batch.packed.bin < first + devices)
        rows = layout.packed(batch, places, first, group, devices)
        cut = spmd.rows(mesh, rows._replace(spot=None))  # a spot is of all that are run
        return grad(batch, layout.only(places, inside), cut._replace(spot=rows.spot))

    def accumulate(turn, total):
        grads, terms = one(turn)
        new = spmd.trained(mesh, grads), terms
        return jax.tree.map(lambda x, y: x | y if x.dtype == bool else x + y, total, new)

    turns = -(-batch.packed.count // devices)
    return jax.lax.fori_loop(0, turns, accumulate, _nothing(one, jnp.int32(0)))


def _nothing(function: Callable, *args):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))
