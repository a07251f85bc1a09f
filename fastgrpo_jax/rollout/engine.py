"""What an engine is laid out for: row and slot counts that are compiled, and the list of programs."""

import dataclasses
from typing import Any, NamedTuple

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
      partial: some rows of a rollout may be done before it begins, so it may begin with fewer.
      tail: the engine for the last rows, on some of this one's devices; the others are idle then.
      name: what the kinds of its programs begin with.
      scale: how many times its devices there are in the whole mesh.
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
    partial: bool = False
    tail: "Engine | None" = None
    name: str = ""
    scale: int = 1
    pool: pool_lib.Pool = dataclasses.field(default_factory=pool_lib.Pool)


def with_tail(engine: Engine, mesh: Any, rows: int) -> Engine:
    """Let the last rows be decoded on a smaller mesh, `rows` of them on each device at most."""
    policy = dataclasses.replace(engine.spec.policy, mesh=mesh)
    devices = sharding.shards(mesh)
    most = min(rows * devices, buckets.below(engine.rows, engine.rows[-1]) or devices)
    tail = dataclasses.replace(
        engine,
        spec=dataclasses.replace(engine.spec, policy=policy),
        rows=buckets.row_ladder(max(most, devices), "", devices),
        name="tail ",
        scale=sharding.shards(engine.spec.policy.mesh) // devices,
    )
    return dataclasses.replace(engine, tail=tail)


def key(engine: Engine, kind: str, *parts) -> tuple:
    """Name a program of an engine; those of a tail are told apart from the whole mesh's."""
    return (engine.name + kind, *parts)


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
    sizes = [base.Bucket(r, s) for r in engine.rows for s in engine.slots]
    keys: list[tuple] = [("prefill",)]
    begun = engine.rows if engine.partial else engine.rows[-1:]
    keys += [("start", base.Bucket(rows, s)) for rows in begun for s in engine.slots]
    keys += _decoding(engine, controller, sizes)
    if engine.total > engine.rows[-1]:
        full = [size for size in sizes if size.rows == engine.rows[-1]]
        keys += [("admit", old, new) for old in full for new in sizes if new.slots >= old.slots]
    if engine.tail:
        last = buckets.at_least(engine.rows, engine.tail.rows[-1])
        met = [size for size in sizes if size.rows <= last]  # as they come from the whole mesh
        keys += _decoding(engine.tail, controller, met)
    return keys


def _decoding(engine: Engine, controller: strategy.Controller, met: list[base.Bucket]):
    """List the keys of blocks and of what lies between them; the sizes `met` are resized too."""
    sizes = [base.Bucket(r, s) for r in engine.rows for s in engine.slots]
    keys, uses_learned = [], False
    for bucket in sizes:
        for choice in controller.possible(weighed(engine, bucket).rows):
            keys.append(key(engine, "block", bucket, choice))
            uses_learned |= choice.drafter == "learned"
    if engine.spec.eagle and uses_learned:
        keys += [key(engine, "activate", bucket) for bucket in sizes]
    return keys + [
        key(engine, "resize", old, new)
        for old in dict.fromkeys((*met, *sizes))
        for new in sizes
        if new != old and new.rows <= old.rows and new.slots >= old.slots
    ]


def weighed(engine: Engine, bucket: base.Bucket) -> base.Bucket:
    """Give the bucket of the whole mesh that has as many rows on each device, which is how a
    controller knows a tail's."""
    return dataclasses.replace(bucket, rows=bucket.rows * engine.scale)


def warm_up(
    engine: Engine, weights: speculate.Weights, controller: strategy.Controller, threads: int
) -> None:
    """Compile every decode block that a controller may choose, several at a time.

    Blocks take nearly all of the compiler's time; the small programs between them are compiled
    when they are met.
    """
    asked = programs(engine, controller)
    jobs = _blocks(engine, weights, asked)
    if engine.tail:
        narrow = sharding.narrow(engine.tail.spec.policy.mesh, weights)
        jobs += _blocks(engine.tail, narrow, asked)
    pool_lib.warm_up(engine.pool, jobs, threads)


def _blocks(engine: Engine, weights: speculate.Weights, asked: list[tuple]) -> list[pool_lib.Job]:
    """Describe the decode blocks of an engine that are asked for."""
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
    for name in asked:
        if name[0] != engine.name + "block":
            continue
        _, bucket, choice = name
        state = jax.eval_shape(lambda b=bucket: decode.empty_state(spec, b, sequences))
        state = state._replace(sequences=sequences)
        state = sharding.shapes(mesh, state, mesh and sharding.of_rollout(mesh, state))
        args = (known, sample, stop, state, one, one)
        jobs.append(pool_lib.Job(name, decode.decode_block, {0: spec, 1: choice}, args))
    return jobs
