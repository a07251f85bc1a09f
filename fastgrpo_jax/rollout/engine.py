"""What an engine is laid out for: row and slot counts that are compiled, and the list of programs."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fastgrpo_jax import base, sharding
from fastgrpo_jax.rollout import buckets, decode, speculate, strategy
from fastgrpo_jax.rollout import pool as pool_lib


@dataclasses.dataclass
class Engine:
    """A rollout engine for one shape of rollout: P prompts, G completions of each.

    Attributes:
      rows: row counts that are compiled, ascending; what is beyond the last one waits.
      total: P * G, the rows of a rollout.
      slots: slot counts that are compiled, ascending.
      prompt_slots: slots of the prefill, a multiple of its chunk.
      max_length: L, the longest sequence.
      rounds: rounds of a block before the host looks again.
      keep_finished: never compact and never stop early (the papers' baseline, for benches).
    """

    spec: speculate.Spec
    rows: tuple[int, ...]
    total: int
    slots: tuple[int, ...]
    prompt_slots: int
    max_length: int
    rounds: int
    stop_tokens: tuple[int, ...]
    keep_finished: bool = False
    pool: pool_lib.Pool = dataclasses.field(default_factory=pool_lib.Pool)


class Limits(NamedTuple):
    """Token limits: of a prompt, of a response (stop token included), of both together."""

    prompt: int
    response: int
    total: int


def make_engine(
    spec: speculate.Spec,
    *,
    rows: tuple[int, ...],
    total: int = 0,
    limits: Limits,
    stop_tokens: tuple[int, ...],
    slot_step: int = 128,
    rounds: int = 16,
    span: int = 1,
) -> Engine:
    """Lay out an engine for rollouts of `total` rows (P * G; 0: rows[-1]) under given limits.

    `rows` is a ladder, see `buckets.row_ladder`; it may end below `total`. `span` is the largest `DraftStrategy.span` that
    will be asked for.

    Raises:
      ValueError: a row count that the devices cannot cut into equal parts.
    """
    chunk = spec.prefill_chunk
    if any(size % sharding.shards(spec.policy.mesh) for size in rows):
        raise ValueError(f"rows {rows} do not divide into {sharding.shards(spec.policy.mesh)}")
    return Engine(
        spec=spec,
        rows=rows,
        total=total or rows[-1],
        slots=buckets.slot_ladder(limits.total - 1 + span, slot_step),
        prompt_slots=-(-max(limits.prompt, 1) // chunk) * chunk,
        max_length=limits.total,
        rounds=rounds,
        stop_tokens=stop_tokens,
    )


def programs(engine: Engine, controller: strategy.Controller) -> list[tuple]:
    """List the keys of every program that rollouts under a controller may need."""
    keys: list[tuple] = [("prefill",)]
    sizes = [base.Bucket(r, s) for r in engine.rows for s in engine.slots]
    keys += [("start", base.Bucket(engine.rows[-1], s)) for s in engine.slots]
    uses_learned = False
    for bucket in sizes:
        for choice in controller.possible(bucket.rows):
            keys.append(("block", bucket, choice))
            uses_learned |= choice.drafter == "learned"
    if engine.spec.eagle and uses_learned:
        keys += [("activate", bucket) for bucket in sizes]
    keys += [
        ("resize", old, new)
        for old in sizes
        for new in sizes
        if new != old and new.rows <= old.rows and new.slots >= old.slots
    ]
    if engine.total > engine.rows[-1]:
        full = [size for size in sizes if size.rows == engine.rows[-1]]
        keys += [("admit", old, new) for old in full for new in sizes if new.slots >= old.slots]
    return keys


def warm_up(
    engine: Engine, weights: speculate.Weights, controller: strategy.Controller, threads: int
) -> None:
    """Compile every decode block that a controller may choose, several at a time.

    Blocks take nearly all of the compiler's time; the small programs between them are compiled
    when they are met.
    """
    n, length, spec = engine.total, engine.max_length, engine.spec
    mesh = spec.policy.mesh

    def shaped(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.everywhere(mesh))

    grid, row, flag = (
        shaped((n, length), jnp.float32),
        shaped((n,), jnp.int32),
        shaped((n,), bool),
    )
    sequences = base.Sequences(
        shaped((n, length), jnp.int32), grid, grid, row, row, row, flag, flag
    )
    chance = shaped((n,), jnp.float32)
    sample = base.Sampling(shaped((n, 2), jnp.uint32), chance, row, chance)
    one, stop = shaped((), jnp.int32), shaped((len(engine.stop_tokens),), jnp.int32)
    known = sharding.shapes(mesh, weights)
    jobs = []
    for key in programs(engine, controller):
        if key[0] != "block":
            continue
        _, bucket, choice = key
        state = jax.eval_shape(lambda b=bucket: decode.empty_state(spec, b, sequences))
        state = state._replace(sequences=sequences)
        state = sharding.shapes(mesh, state, mesh and sharding.of_rollout(mesh, state))
        args = (known, sample, stop, state, one, one)
        jobs.append(pool_lib.Job(key, decode.decode_block, {0: spec, 1: choice}, args))
    pool_lib.warm_up(engine.pool, jobs, threads)
