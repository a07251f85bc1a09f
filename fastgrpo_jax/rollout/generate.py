"""The host loop of a rollout: prefill, then schedule, run a block, look, until all are done.

The host reads one small report per block. Everything that decides tokens (noise addresses,
prefill shape, limits) is fixed before the loop; the loop only decides speed.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base, sharding
from fastgrpo_jax.rollout import buckets, decode, inputs, record, schedule, speculate, strategy
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.rollout import pool as pool_lib


def _prefill(
    engine: engine_lib.Engine, weights: speculate.Weights, prompts
) -> tuple[decode.Prompts, ...]:
    """Read all prompts in the canonical shape, R at a time on each device (the last filled up)."""
    mesh, size = engine.spec.policy.mesh, engine.spec.prefill_rows
    devices = sharding.shards(mesh)
    times = -(-len(prompts) // (devices * size))
    tokens = np.zeros((devices, times, size, engine.prompt_slots + 1), np.int32)
    length = np.ones((devices, times, size), np.int32)
    for i, prompt in enumerate(prompts):
        place = np.unravel_index(i, length.shape)  # a device reads prompts that follow one another
        tokens[place][: len(prompt)] = prompt
        length[place] = len(prompt)
    read = []
    for i in range(times):
        some = tokens[:, i].reshape(devices * size, -1), length[:, i].reshape(-1)
        read.append(
            pool_lib.call(
                engine.pool,
                ("prefill",),
                decode.prefill,
                {0: engine.spec, 1: engine.prompt_slots},
                weights,
                *sharding.put(mesh, some),
            )
        )
    return tuple(read)


class _Live(NamedTuple):
    """A rollout under way: the device's state, and the host's view of it."""

    state: base.RolloutState
    bucket: base.Bucket
    seats: schedule.Seats


def _begin(engine, request, read, sequences, need) -> _Live:
    """Seat the first rows, each with its prompt's memory and slots for one round."""
    done = _done(engine, request)
    lines = schedule.order(engine.spec.group, len(request.prompts), request.expected)
    lines = tuple(line for line in lines if not done[line])
    move = schedule.seat(schedule.begin(lines, engine.rows[-1], engine.total), done, engine.rows)
    bucket = base.Bucket(len(move.fresh), buckets.at_least(engine.slots, need))
    mesh = engine.spec.policy.mesh
    state = pool_lib.call(
        engine.pool,
        ("start", bucket),
        decode.start,
        {4: bucket.slots, 5: mesh},
        read,
        sequences,
        *sharding.put(mesh, (move.fresh, _source(engine, request, move))),
    )
    return _Live(state, bucket, move.seats)


def _done(engine, request) -> np.ndarray:
    return np.zeros(engine.total, bool) if request.done is None else np.array(request.done)


def _source(engine, request, move: schedule.Move):
    """Say which of what was read each fresh row goes on from."""
    return move.fresh if request.starts is not None else move.fresh // engine.spec.group


def _settle(engine, request, live: _Live, move: schedule.Move, read, need: int) -> _Live:
    """Make the move, and grow the slots where the next round needs more."""
    slots = max(live.bucket.slots, buckets.at_least(engine.slots, need))
    new, mesh = base.Bucket(len(move.keep), slots), engine.spec.policy.mesh
    keep = sharding.put(mesh, move.keep)
    if move.admitted:
        state = pool_lib.call(
            engine.pool,
            ("admit", live.bucket, new),
            decode.admit,
            {5: slots, 6: mesh},
            read,
            live.state,
            keep,
            *sharding.put(mesh, (move.fresh, _source(engine, request, move))),
        )
        return _Live(state, new, move.seats)
    if new == live.bucket:
        return live
    key = engine_lib.key(engine, "resize", live.bucket, new)
    state = pool_lib.call(engine.pool, key, decode.resize, {2: slots, 3: mesh}, live.state, keep)
    return _Live(state, new, move.seats)


def rollout(
    engine: engine_lib.Engine,
    weights: speculate.Weights,
    request: inputs.Request,
    settings: inputs.Settings,
    limits: engine_lib.Limits,
    controller: strategy.Controller,
    look: Callable[[int], None] = lambda live: None,
    memory: strategy.Memory | None = None,
    agree: Callable[[list[float]], list[float]] | None = None,
    spare: Callable[[], None] = lambda: None,
) -> record.Rollout:
    """Answer P prompts G times each.

    The tokens depend on the weights, the request, the settings and the limits alone. `look` is
    told the number of live rows before each block, and may raise to stop the rollout. `memory`
    is what the controller has seen in earlier rollouts. Of several processes each has a clock of
    its own, so there the controller chooses without this rollout's times, and remembers those
    that `agree` makes one process's. `spare` is called when the rows that are left move to the
    engine's tail, and the other devices are idle until the end.

    Raises:
      UserError: for a prompt that is empty or above the limit.
    """
    clock, first = time.perf_counter(), engine.pool.compiled
    memory = before = memory or {}
    span = max(choice.span for choice in controller.possible(engine.rows[-1]))
    sequences = inputs.sequences(engine, request, limits)
    length = np.asarray([len(start) for start in request.rows(engine.spec.group)])
    done = _done(engine, request)
    read = _prefill(engine, weights, request.prompts if request.starts is None else request.starts)
    live = _begin(engine, request, read, sequences, int(length.max()) - 1 + span)
    jax.block_until_ready(live.state)
    prefilled = time.perf_counter()
    fixed = (
        inputs.sampling_of(request, engine.spec.group, settings),
        jnp.asarray(engine.stop_tokens, jnp.int32),
    )
    known = weights, *sharding.put(engine.spec.policy.mesh, fixed)
    ready, blocks, outcomes = True, [], []
    while not done.all():
        look(int((~done).sum()))
        if engine.tail and _fits(engine.tail, live, done):
            move = schedule.seat(live.seats, done, engine.rows)
            live = _settle(engine, request, live, move, read, 0)
            engine, live, known = _retreat(engine.tail, live, known)
            spare()
        move = schedule.seat(live.seats, done, engine.rows, engine.keep_finished)
        going = move.seats.lines[schedule.alive(move.seats, done)]
        bucket = base.Bucket(len(move.keep), live.bucket.slots)
        now = strategy.Situation(engine_lib.weighed(engine, bucket), len(going), len(blocks))
        choice, rounds = controller.choose(memory, now, engine.rounds)
        live = _settle(
            engine, request, live, move, read, int(length[going].max()) - 1 + choice.span
        )
        if choice.drafter == "learned" and not ready:
            live = _activate(engine, known[0], live)
        ready = choice.drafter == "learned"
        compiled = engine.pool.compiled
        live, block = _run_block(engine, known, live, choice, rounds, len(going))
        blocks.append(block)
        outcome = _outcome(now._replace(bucket=engine_lib.weighed(engine, live.bucket)), block)
        if engine.pool.compiled > compiled:  # its first run is no measure of its speed
            outcome = outcome._replace(seconds=math.nan)
        outcomes.append(outcome)
        memory = controller.observe(
            memory, outcome._replace(seconds=math.nan) if agree else outcome
        )
        length, done = block.report.length, block.report.done
    if agree:
        memory = _timed(controller, before, outcomes, agree)
    batch = _finish(jax.device_get(live.state.sequences))
    return record.Rollout(
        batch,
        tuple(blocks),
        prefilled - clock,
        time.perf_counter() - prefilled,
        engine.pool.compiled - first,
        memory,
    )


def _timed(controller, memory, outcomes: list[strategy.Outcome], agree) -> strategy.Memory:
    """Observe a rollout's blocks again, now with the times of one process."""
    seconds = agree([outcome.seconds for outcome in outcomes])
    for outcome, own in zip(outcomes, seconds):
        memory = controller.observe(memory, outcome._replace(seconds=own))
    return memory


def _fits(tail: engine_lib.Engine, live: _Live, done) -> bool:
    return not live.seats.waiting and len(schedule.alive(live.seats, done)) <= tail.rows[-1]


def _retreat(tail: engine_lib.Engine, live: _Live, known: tuple) -> tuple:
    """Move a rollout to the devices of its tail."""
    mesh = tail.spec.policy.mesh
    state = sharding.move_rollout(mesh, live.state)
    return tail, live._replace(state=state), sharding.narrow(mesh, known)


def _activate(engine: engine_lib.Engine, weights: speculate.Weights, live: _Live) -> _Live:
    """Feed the learned drafter what was said while it was off."""
    key = engine_lib.key(engine, "activate", live.bucket)
    static = {0: engine.spec}
    state = pool_lib.call(engine.pool, key, decode.activate, static, weights, live.state)
    return live._replace(state=state)


def _run_block(
    engine: engine_lib.Engine, known: tuple, live: _Live, choice, rounds: int, rows: int
) -> tuple[_Live, record.BlockRecord]:
    """Run one block on weights, sampling and stop tokens, and read its report: the one sync."""
    shrink_to = schedule.leave_at(live.seats, engine.rows, engine.keep_finished)
    if engine.tail and not live.seats.waiting:
        shrink_to = max(shrink_to, engine.tail.rows[-1])
    began, compiling = time.perf_counter(), engine.pool.seconds
    state, report = pool_lib.call(
        engine.pool,
        engine_lib.key(engine, "block", live.bucket, choice),
        decode.decode_block,
        {0: engine.spec, 1: choice},
        *known,
        live.state,
        *sharding.put(engine.spec.policy.mesh, (jnp.int32(shrink_to), jnp.int32(rounds))),
    )
    report = jax.device_get(report)
    seconds = time.perf_counter() - began - (engine.pool.seconds - compiling)
    if not report.rounds:
        raise RuntimeError(f"no round fits {live.bucket} with {choice}: too few slots")
    block = record.BlockRecord(*dataclasses.astuple(live.bucket), choice, rows, seconds, report)
    return live._replace(state=state), block


def _outcome(now: strategy.Situation, block: record.BlockRecord) -> strategy.Outcome:
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
