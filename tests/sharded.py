"""Laws on several devices: what they must agree with is what one device makes.

Needs 8 devices; `test_sharding.py` runs this file in a process that has them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base, sharding
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.rollout import buckets, decode, generate, speculate, strategy
from fastgrpo_jax.rollout import engine as engine_lib
from tests.rollout import toys

CONFIG = dataclasses.replace(toys.CONFIG, vocab=40, heads=4, kv_heads=2, qk_norm=True)
EAGLE = eagle.config_for(CONFIG, "fastgrpo")
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (4, 1, 2), (1, 2, 4)]


@functools.cache
def mesh_of(sizes):
    return sizes and sharding.mesh_for(*sizes)


def spec_of(sizes, **changes) -> speculate.Spec:
    config = dataclasses.replace(CONFIG, mesh=mesh_of(sizes))
    return speculate.Spec(policy=config, eagle=EAGLE, group=toys.GROUP, prefill_chunk=8, **changes)


def weights_of(sizes) -> speculate.Weights:
    mesh = mesh_of(sizes)
    params = toys.policy_params(CONFIG), toys.drafter_params(EAGLE)
    if mesh is not None:
        params = decode.cast(sharding.put_params(mesh, params), jnp.float64, mesh)
    return speculate.Weights(*params, None, sharding.put(mesh, jnp.float32(1)))


def engine_of(sizes, rows="8", most=toys.ROWS, rounds=2):
    spec = spec_of(sizes)
    return engine_lib.make_engine(
        spec,
        rows=buckets.row_ladder(most, rows, sharding.shards(spec.policy.mesh)),
        total=toys.ROWS,
        limits=toys.LIMITS,
        stop_tokens=(toys.STOP,),
        slot_step=48,
        rounds=rounds,
        span=toys.DEEPEST_SPAN,
    )
