"""The training loop: prompts, rollout, rewards, step, files.

All steps run the same executables. Whatever decides the next step (weights, optimisers, the
place in the data) is in the checkpoint; noise and data order are addressed by seed and place,
so a resumed run goes on as if it had not stopped.
"""

import os
import pathlib
import time

import jax
import numpy as np

from fastgrpo_jax import base, hosts, sharding
from fastgrpo_jax.models import eagle_file
from fastgrpo_jax.rollout import costs
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.rollout import pool as pool_lib
from fastgrpo_jax.train import (
    checkpoint,
    drafter,
    metrics,
    play,
    replay,
    report,
    rollouts,
    workdirs,
)
from fastgrpo_jax.train import setup as setup_lib
from fastgrpo_jax.train import signals as signals_lib
from fastgrpo_jax.train import spot as spot_lib
from fastgrpo_jax.train import step as step_lib

COSTS = "costs.json"
_IDLE_STEPS = (3, 10, 30, 100, 300, 1000)  # in a row without an advantage: a warning comes
_SKIPPED = 10  # updates in a row that were not finite: the run ends


def train(c, workdir: str | os.PathLike) -> None:
    """Train, or go on training, in a workdir.

    Raises:
      UserError: for anything that the user can mend.
      signals_lib.Interrupted: after a signal, once the last finished step is saved.
    """
    workdir = pathlib.Path(workdir)
    workdirs.check_alike(c)
    workdirs.make(workdir)
    hosts.together(lambda: workdirs.check_same_run(c, workdir))
    if max(checkpoint.steps(workdir), default=-1) >= c.steps:
        metrics.say(
            f"all {max(checkpoint.steps(workdir))} steps are done; raise --config.steps to go on"
        )
        _conclude(workdir)
        return
    metrics.say(f"loading {c.model.name}")
    setup = hosts.together(lambda: setup_lib.prepare(c))
    hosts.same("what the data or the reward functions' files say", setup.source)
    state = setup_lib.first_state(c, setup)
    manager = checkpoint.open_manager(workdir, c.checkpoint.keep)
    memory = play.Memory(0, 0, {}, setup.counts, {}, {}, [], [], "")
    if manager.latest_step() is not None:
        state, extra = checkpoint.restore(manager, state)
        if extra.keys() != set(play.Memory._fields):
            raise base.UserError(
                f"the checkpoint in {workdir} is of another version of this package (it keeps "
                f"{', '.join(sorted(extra)) or 'nothing'}); go on with that version, or use another --workdir"
            )
        memory = play.Memory(**extra)
        metrics.say(f"resuming after step {int(state.step)}")
    if memory.source and memory.source != setup.source:
        metrics.say(
            "warning: the data or the reward functions' files have changed since the checkpoint"
        )
    memory = memory._replace(source=setup.source)
    if hosts.first():
        workdirs.write_config(c, workdir)
    table = (
        rollouts.cost_table(c, setup, state, workdir / COSTS) if rollouts.needs_costs(c) else None
    )
    controller = rollouts.controller(c, setup, table)
    engine = rollouts.engine(c, setup, controller)
    looks_back = rollouts.looks_back(c, engine, controller)
    _announce(c, setup, engine, controller, table)
    if c.rollout.warmup:
        metrics.say(f"compiling the decode blocks, {c.rollout.warmup} at a time")
        weights = rollouts.weights(c, setup, state, memory.counts)
        if looks_back:
            nobody = [()] * c.task.prompts_per_step
            weights = weights._replace(earlier=rollouts.recall(c, engine, {}, nobody))
        engine_lib.warm_up(engine, weights, controller, c.rollout.warmup)
    progress = metrics.Progress(c.steps, int(state.step))
    engine.pool.on_compile = lambda key: progress.phase(f"compiling {key[0]}")
    writer = hosts.together(
        lambda: metrics.open_writer(workdir, int(state.step), c.log.tensorboard)
    )
    there = {row["step"] for row in metrics.read(workdir)}
    if len(there) < int(state.step):
        metrics.say(
            f"warning: metrics.jsonl lacks {int(state.step) - len(there)} of the steps so far"
        )
    try:
        with signals_lib.Signals() as signals:
            step = step_lib.make_train_step(setup.step)
            spot = _spot(c, setup, state, memory)
            run = play.Run(
                c,
                setup,
                engine,
                controller,
                looks_back,
                step,
                manager,
                writer,
                progress,
                signals,
                spot,
            )
            state, memory = _steps(run, state, memory)
    finally:
        progress.close()
        metrics.close(writer)
        manager.wait_until_finished()
        manager.close()
    if setup.eagle is not None:
        path, learned = workdir / eagle_file.NAME, sharding.fetch(state.drafter)
        if hosts.first():
            eagle_file.save(path, setup.eagle, learned, memory.counts)
    _conclude(workdir)


def _spot(c, setup, state: base.TrainState, memory: play.Memory) -> spot_lib.Trainer | None:
    """Make the trainer for idle devices, and let it compile beside the first rollout."""
    halves = rollouts.spot_meshes(c, setup)
    if not halves:
        return None
    trainer = spot_lib.Trainer(setup.step, halves[1])
    weights = rollouts.weights(c, setup, state, memory.counts)
    student = drafter.State(state.drafter, state.drafter_opt_state)
    rng = np.random.default_rng(0)
    trainer.compile(spot_lib.Given(weights.policy, weights.draft_head, student, [], rng))
    return trainer


def _conclude(workdir: pathlib.Path) -> None:
    """Say what came of a run, and draw it."""
    if not hosts.first():
        return
    rows = metrics.read(workdir)
    metrics.say(f"\n{report.final_summary(rows)}\n\ncurves: {report.write_png(workdir)}")


def _steps(
    run: play.Run, state: base.TrainState, memory: play.Memory
) -> tuple[base.TrainState, play.Memory]:
    """Run the steps that are left. Whatever ends them early, the last finished step is saved."""
    c = run.config

    def save() -> float:
        began = time.perf_counter()
        checkpoint.save(run.manager, state, memory._asdict())
        return time.perf_counter() - began

    idle = skipped = 0  # steps in a row without an advantage; without a finite update
    for number in range(int(state.step), c.steps):
        began = time.perf_counter()
        try:
            played = play.play(run, state, memory)
            run.progress.phase("training")
            run.signals.check(now=True)
        except BaseException as error:  # a signal, a failing reward, a bad row: the state is whole
            agreed = isinstance(error, (base.UserError, signals_lib.Interrupted))
            if number and (agreed or hosts.count() == 1):  # several processes can but save together
                save()
            raise
        row, learning = played.metrics, time.perf_counter()
        if played.spot.state:
            params, moments = played.spot.state
            steps = state.drafter_steps + played.spot.updates
            state = state._replace(drafter=params, drafter_opt_state=moments, drafter_steps=steps)
        batch = step_lib.place(run.setup.step, played.batch)
        state, learned = run.train_step(state, batch)
        row |= {name: float(value) for name, value in jax.device_get(learned).items()}
        memory = played.memory
        state, more = _study_again(run, state, memory, number)
        row |= more
        row["timing_s/train"] = time.perf_counter() - learning
        row.setdefault("drafter/steps", 0.0)
        row["timing_s/checkpoint"] = 0.0
        if number + 1 == c.steps or (number + 1) % c.checkpoint.every == 0:
            run.progress.phase("saving")
            row["timing_s/checkpoint"] = save()
        row["step_time"] = time.perf_counter() - began
        row |= pool_lib.describe(run.engine.pool)
        metrics.write(run.writer, number, row, played.completions)
        run.progress.step(number, row)
        skipped = skipped + 1 if row["policy/skipped"] else 0
        if skipped == 1:
            run.progress.note("warning: this update was not finite, so it was skipped")
        if skipped >= _SKIPPED:
            raise base.UserError(
                f"the last {skipped} updates were not finite and were skipped: the policy is of no "
                f"use any more; begin anew with a lower optim.learning_rate than "
                f"{c.optim.learning_rate:g}"
            )
        idle = idle + 1 if row["frac_reward_zero_std"] == 1 else 0
        if idle in _IDLE_STEPS:
            run.progress.note(
                f"warning: for {idle} steps no group had rewards that differ, so they have "
                f"taught the policy nothing; the last reward is {row['reward']:.3f} (nan: none applies)"
            )
    return state, memory


def _study_again(
    run: play.Run, state: base.TrainState, memory: play.Memory, number: int
) -> tuple[base.TrainState, dict[str, float]]:
    """Update the drafter on sequences of this step and of those before; returns metrics too."""
    c, setup = run.config, run.setup
    if not run.studies:
        return state, {}
    weights = rollouts.weights(c, setup, state, memory.counts)
    done = replay.study(
        replay.config_for(setup.step),
        weights.policy,
        drafter.freeze(weights.policy, weights.draft_ids),
        drafter.State(state.drafter, state.drafter_opt_state),
        memory.replay,
        c.drafter.replay_updates,
        np.random.Generator(np.random.Philox([c.seed, number])),
    )
    state = state._replace(
        drafter=done.state.params,
        drafter_opt_state=done.state.opt_state,
        drafter_steps=state.drafter_steps + done.updates,
    )
    return state, {
        "drafter/replay_loss": done.loss,
        "drafter/replay_updates": float(done.updates),
        "drafter/steps": float(state.drafter_steps),
    }


def _announce(c, setup, engine, controller, table: costs.Table | None) -> None:
    """Say what will run, and list what will be compiled."""
    keys = engine_lib.programs(engine, controller)
    engine.pool.expected = frozenset(keys)
    plan = ", ".join(
        f"{rows}: {' | '.join(map(str, controller.possible(rows)))}" for rows in engine.rows
    )
    knee = (
        f", C_peak {c.rollout.c_peak or costs.c_peak(table)}" if table or c.rollout.c_peak else ""
    )
    if c.sampling.temperature == 0:
        metrics.say(
            "warning: sampling.temperature is 0, so all completions of a group are equal, every "
            "advantage is 0 and the policy cannot learn"
        )
    adapted = setup.step.lora
    trained = f"; adapters of rank {adapted.rank} are trained in their place" if adapted else ""
    metrics.say(
        f"{sharding.describe(setup.model.config.mesh)}\n"
        f"model {setup.model.source}, {base.tree_bytes(setup.model.params) / 4e6:.1f}M parameters{trained}\n"
        f"{c.task.prompts_per_step} prompts x {c.task.group} completions a step, at most "
        f"{setup.limits.response} tokens each; {c.steps} steps\n"
        f"controller {controller.name}{knee}; draft strategies by live rows: {plan}\n"
        f"programs that may be compiled: {len(keys)} for {len(engine.rows)} row counts and slots "
        f"{', '.join(map(str, engine.slots))}, and the train step"
    )
