"""The host loop of a rollout: prefill, then schedule, run a block, look, until all are done.

The host reads one small report per block. Everything that decides tokens (noise addresses,
prefill shape, limits) is fixed before the loop; the loop only decides speed.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.rollout import buckets, decode, sampling, strategy
from fastgrpo_jax.rollout import pool as pool_lib


@dataclasses.dataclass
class Engine:
    """A rollout engine for one shape of rollout: P prompts, G completions of each.

    Attributes:
      rows: row counts that are compiled, ascending; the last is P * G.
      slots: slot counts that are compiled, ascending.
      prompt_slots: slots of the prefill, a multiple of its chunk.
      max_length: L, the longest sequence.
      rounds: rounds of a block before the host looks again.
      keep_finished: never compact and never stop early (the papers' baseline, for benches).
    """

    spec: decode.Spec
    rows: tuple[int, ...]
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


class Settings(NamedTuple):
    """Sampling settings of a whole rollout."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0


class Request(NamedTuple):
    """What to answer: token ids of P prompts and their places in the data stream."""

    prompts: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]
    seed: int
    step: int


class BlockRecord(NamedTuple):
    """One decode block as the host saw it."""

    rows: int
    slots: int
    strategy: base.DraftStrategy
    live: int
    seconds: float
    report: base.BlockReport


class Rollout(NamedTuple):
    """A finished rollout: what was said, and how it went.

    compiled: programs that were compiled meanwhile; their time is in prefill_seconds and
      decode_seconds, but not in the blocks' own.
    memory: what the controller has seen, to begin the next rollout with.
    """

    batch: base.RolloutBatch
    blocks: tuple[BlockRecord, ...]
    prefill_seconds: float
    decode_seconds: float
    compiled: int
    memory: strategy.Memory


def make_engine(
    spec: decode.Spec,
    *,
    rows: tuple[int, ...],
    limits: Limits,
    stop_tokens: tuple[int, ...],
    slot_step: int = 128,
    rounds: int = 16,
    span: int = 1,
) -> Engine:
    """Lay out an engine for rollouts of rows[-1] rows (P * G) under the given limits.

    `rows` is a ladder, see `buckets.row_ladder`. `span` is the largest `DraftStrategy.span` that
    will be asked for.
    """
    chunk = spec.prefill_chunk
    return Engine(
        spec=spec,
        rows=rows,
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
    keys += [("start", s) for s in engine.slots]
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
    return keys


def _sequences(engine: Engine, request: Request, limits: Limits) -> base.Sequences:
    group, count = engine.spec.group, len(request.prompts)
    rows = count * group
    if limits.total > engine.max_length or rows != engine.rows[-1]:
        raise ValueError(
            f"{rows} rows of at most {limits.total} tokens; the engine is laid out for "
            f"{engine.rows[-1]} rows of {engine.max_length}"
        )
    tokens = np.full((rows, engine.max_length), -1, np.int32)
    length = np.repeat([len(p) for p in request.prompts], group).astype(np.int32)
    longest = min(limits.prompt, limits.total - 1)
    for i, prompt in enumerate(request.prompts):
        if not 1 <= len(prompt) <= longest:
            raise base.UserError(
                f"prompt at place {request.places[i]} has {len(prompt)} tokens; allowed: 1 to "
                f"{longest} (task.max_prompt_length, and one less than sampling.max_length)"
            )
        tokens[i * group : (i + 1) * group, : len(prompt)] = prompt
    zeros = np.zeros((rows, engine.max_length), np.float32)
    return base.Sequences(
        tokens=jnp.asarray(tokens),
        logps=jnp.asarray(zeros),
        masses=jnp.asarray(zeros),
        prompt_length=jnp.asarray(length),
        length=jnp.asarray(length),
        limit=jnp.asarray(np.minimum(length + limits.response, limits.total).astype(np.int32)),
        done=jnp.zeros(rows, bool),
        stopped=jnp.zeros(rows, bool),
    )


def _settings(request: Request, group: int, settings: Settings) -> base.Sampling:
    rows = len(request.places) * group
    places = np.repeat(np.asarray(request.places, np.uint64), group)
    samples = np.tile(np.arange(group, dtype=np.uint64), len(request.places))
    return base.Sampling(
        key=sampling.row_keys(request.seed, request.step, places, samples),
        temperature=jnp.full(rows, settings.temperature, jnp.float32),
        top_k=jnp.full(rows, settings.top_k, jnp.int32),
        top_p=jnp.full(rows, settings.top_p, jnp.float32),
    )


def _prefill(engine: Engine, weights: decode.Weights, prompts) -> tuple[decode.Prompts, ...]:
    """Read all prompts in the canonical shape, R at a time (the last batch filled up)."""
    size = engine.spec.prefill_rows
    width = engine.prompt_slots + 1
    read = []
    for at in range(0, len(prompts), size):
        some = prompts[at : at + size]
        tokens = np.zeros((size, width), np.int32)
        for i, prompt in enumerate(some):
            tokens[i, : len(prompt)] = prompt
        length = np.ones(size, np.int32)
        length[: len(some)] = [len(p) for p in some]
        read.append(
            pool_lib.call(
                engine.pool,
                ("prefill",),
                decode.prefill,
                {0: engine.spec, 1: engine.prompt_slots},
                weights,
                jnp.asarray(tokens),
                jnp.asarray(length),
            )
        )
    return tuple(read)


def _begin(engine, weights, request, limits, span) -> base.RolloutState:
    """Prefill and replicate each prompt's memory over its group, with slots for one round."""
    sequences = _sequences(engine, request, limits)
    read = _prefill(engine, weights, request.prompts)
    rows = engine.rows[-1]
    longest = max(map(len, request.prompts))
    slots = buckets.at_least(engine.slots, longest - 1 + span)
    return pool_lib.call(
        engine.pool,
        ("start", slots),
        decode.start,
        {4: slots},
        read,
        sequences,
        jnp.arange(rows, dtype=jnp.int32),
        jnp.arange(rows, dtype=jnp.int32) // engine.spec.group,
    )


def _fit(engine, state, bucket, rows_of, live, need) -> tuple:
    """Move to the smallest bucket that holds the live rows and the needed slots.

    Returns (state, bucket, rows_of), where rows_of mirrors state.rows on the host.
    """
    rows = bucket.rows
    if not engine.keep_finished:
        rows = buckets.at_least(engine.rows, len(live))
    slots = max(bucket.slots, buckets.at_least(engine.slots, need))
    new = base.Bucket(rows, slots)
    if new == bucket:
        return state, bucket, rows_of
    if new.rows == bucket.rows:
        keep = np.arange(rows)
    else:
        keep = np.flatnonzero(np.isin(rows_of, live))
        keep = np.concatenate([keep, np.full(rows - len(keep), bucket.rows)])
    state = pool_lib.call(
        engine.pool,
        ("resize", bucket, new),
        decode.resize,
        {2: new.slots},
        state,
        jnp.asarray(keep, jnp.int32),
    )
    padded = np.append(rows_of, engine.rows[-1])
    return state, new, padded[np.minimum(keep, bucket.rows)]


def rollout(
    engine: Engine,
    weights: decode.Weights,
    request: Request,
    settings: Settings,
    limits: Limits,
    controller: strategy.Controller,
    look: Callable[[int], None] = lambda live: None,
    memory: strategy.Memory | None = None,
) -> Rollout:
    """Answer P prompts G times each.

    The tokens depend on the weights, the request, the settings and the limits alone. `look` is
    told the number of live rows before each block, and may raise to stop the rollout. `memory`
    is what the controller has seen in earlier rollouts.

    Raises:
      UserError: for a prompt that is empty or above the limit.
    """
    clock, known = time.perf_counter(), len(engine.pool.programs)
    memory = memory or {}
    span = max(choice.span for choice in controller.possible(engine.rows[-1]))
    state = jax.block_until_ready(_begin(engine, weights, request, limits, span))
    prefilled = time.perf_counter()
    sample = _settings(request, engine.spec.group, settings)
    stop = jnp.asarray(engine.stop_tokens, jnp.int32)
    bucket = base.Bucket(engine.rows[-1], state.cache.k[0].shape[2])
    rows_of = np.arange(bucket.rows)
    length = np.asarray([len(p) for p in request.prompts for _ in range(engine.spec.group)])
    live, ready, blocks = rows_of, True, []
    while len(live):
        look(len(live))
        size = bucket.rows if engine.keep_finished else buckets.at_least(engine.rows, len(live))
        now = strategy.Situation(base.Bucket(size, bucket.slots), len(live), len(blocks))
        choice, rounds = controller.choose(memory, now, engine.rounds)
        need = int(length[live].max()) - 1 + choice.span
        state, bucket, rows_of = _fit(engine, state, bucket, rows_of, live, need)
        if choice.drafter == "learned" and not ready:
            key = ("activate", bucket)
            state = pool_lib.call(
                engine.pool, key, decode.activate, {0: engine.spec}, weights, state
            )
        ready = choice.drafter == "learned"
        shrink_to = 0 if engine.keep_finished else buckets.below(engine.rows, bucket.rows)
        began, compiling = time.perf_counter(), engine.pool.seconds
        state, report = pool_lib.call(
            engine.pool,
            ("block", bucket, choice),
            decode.decode_block,
            {0: engine.spec, 1: choice},
            weights,
            sample,
            stop,
            state,
            jnp.int32(shrink_to),
            jnp.int32(rounds),
        )
        report = jax.device_get(report)
        seconds = time.perf_counter() - began - (engine.pool.seconds - compiling)
        if not report.rounds:
            raise RuntimeError(f"no round fits {bucket} with {choice}: the slots are too few")
        blocks.append(BlockRecord(bucket.rows, bucket.slots, choice, len(live), seconds, report))
        memory = controller.observe(memory, _outcome(now._replace(bucket=bucket), blocks[-1]))
        length, live = report.length, np.flatnonzero(~report.done)
    batch = _finish(jax.device_get(state.sequences))
    return Rollout(
        batch,
        tuple(blocks),
        prefilled - clock,
        time.perf_counter() - prefilled,
        len(engine.pool.programs) - known,
        memory,
    )


def _outcome(now: strategy.Situation, block: BlockRecord) -> strategy.Outcome:
    r = block.report
    return strategy.Outcome(
        now,
        block.strategy,
        int(r.rounds),
        int(r.row_rounds),
        int(r.emitted),
        tuple(map(int, r.accepted)),
        tuple(map(int, r.tried)),
        block.seconds,
    )


def _finish(s: base.Sequences) -> base.RolloutBatch:
    known = np.arange(s.tokens.shape[1]) < s.length[:, None]
    return base.RolloutBatch(
        tokens=np.where(known, s.tokens, 0),
        logps=s.logps,
        masses=s.masses,
        prompt_length=s.prompt_length,
        length=s.length,
        stopped=s.stopped,
    )


def statistics(run: Rollout) -> dict[str, float]:
    """Summarise a rollout's blocks as metrics; the drafter's own are of its rounds only."""
    rounds = sum(int(b.report.rounds) for b in run.blocks)
    row_rounds = sum(int(b.report.row_rounds) for b in run.blocks)
    emitted = sum(int(b.report.emitted) for b in run.blocks)
    off = sum(int(b.report.rounds) for b in run.blocks if not b.strategy.depth)
    out = {
        "spec/tokens_per_target_step": emitted / max(row_rounds, 1),
        "spec/live_rows_mean": row_rounds / max(rounds, 1),
        "spec/off_fraction": off / max(rounds, 1),
        "rollout/tokens_per_s": emitted / max(run.prefill_seconds + run.decode_seconds, 1e-9),
        "timing_s/prefill": run.prefill_seconds,
        "timing_s/decode": run.decode_seconds,
    }
    learned = [b for b in run.blocks if b.strategy.drafter == "learned"]
    drafted = learned or [b for b in run.blocks if b.strategy.depth]
    if sum(int(b.report.row_rounds) for b in drafted):
        out["spec/accept_length"] = sum(int(b.report.emitted) for b in drafted) / sum(
            int(b.report.row_rounds) for b in drafted
        )
        accepted = sum(b.report.accepted for b in drafted)
        tried = sum(b.report.tried for b in drafted)
        for i, (a, t) in enumerate(zip(accepted, tried)):
            if t:
                out[f"spec/accept_rate_pos_{i}"] = float(a / t)
    return out
