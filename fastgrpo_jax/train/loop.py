"""The training loop: prompts, rollout, rewards, step, files.

All steps run the same executables. Whatever decides the next step (weights, optimisers, the
place in the data) is in the checkpoint; noise and data order are addressed by seed and place,
so a resumed run goes on as if it had not stopped.
"""

import os
import pathlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from fastgrpo_jax import base, sharding
from fastgrpo_jax.models import eagle_file
from fastgrpo_jax.rollout import (
    calibrate,
    corpus,
    costs,
    draft_vocab,
    generate,
    speculate,
    strategy,
)
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.rollout import pool as pool_lib
from fastgrpo_jax.train import answers as answers_lib
from fastgrpo_jax.train import (
    checkpoint,
    data,
    drafter,
    grpo,
    lengths,
    metrics,
    packing,
    replay,
    report,
    resample,
    rollouts,
    workdirs,
)
from fastgrpo_jax.train import setup as setup_lib
from fastgrpo_jax.train import signals as signals_lib
from fastgrpo_jax.train import step as step_lib

COSTS = "costs.json"
_IDLE_STEPS = (3, 10, 30, 100, 300, 1000)  # in a row without an advantage: a warning comes
_SKIPPED = 10  # updates in a row that were not finite: the run ends


class Run(NamedTuple):
    """The fixed parts of a running training."""

    config: Any
    setup: setup_lib.Setup
    engine: engine_lib.Engine
    controller: strategy.Controller
    looks_back: bool  # at earlier answers to a prompt
    train_step: Any
    manager: Any
    writer: metrics.Writer
    progress: metrics.Progress
    signals: signals_lib.Signals

    @property
    def studies(self) -> bool:
        """Whether the drafter learns from sequences again."""
        return bool(self.setup.step.eagle) and self.config.drafter.replay_updates > 0

    @property
    def waits(self) -> bool:
        """Whether rows wait for a seat, so that their order counts."""
        return self.engine.total > self.engine.rows[-1]


class Memory(NamedTuple):
    """What a checkpoint keeps beside the train state."""

    cursor: int  # place in the data stream
    num_tokens: int  # of all sequences so far, prompts included
    controller: dict[str, Any]  # what the rollout's controller has seen
    counts: dict[str, int]  # of each token id emitted so far, for the draft vocabulary
    lengths: lengths.Lengths  # of each prompt's responses, where rows wait for a seat
    corpus: corpus.Corpus  # earlier answers, where the n-gram drafter may be chosen
    replay: replay.Buffer  # sequences that the drafter learns from again
    source: str  # fingerprint of the data and of the rewards' files


def train(c, workdir: str | os.PathLike) -> None:
    """Train, or go on training, in a workdir.

    Raises:
      UserError: for anything that the user can mend.
      signals_lib.Interrupted: after a signal, once the last finished step is saved.
    """
    workdir = pathlib.Path(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise base.UserError(f"--workdir is {str(workdir)!r}: {error.strerror}") from error
    workdirs.check_same_run(c, workdir)
    if max(checkpoint.steps(workdir), default=-1) >= c.steps:
        metrics.say(
            f"all {max(checkpoint.steps(workdir))} steps are done; raise --config.steps to go on"
        )
        _conclude(workdir)
        return
    metrics.say(f"loading {c.model.name}")
    setup = setup_lib.prepare(c)
    state = setup_lib.first_state(c, setup)
    manager = checkpoint.open_manager(workdir, c.checkpoint.keep)
    memory = Memory(0, 0, {}, setup.counts, {}, {}, [], "")
    if manager.latest_step() is not None:
        state, extra = checkpoint.restore(manager, state)
        if extra.keys() != set(Memory._fields):
            raise base.UserError(
                f"the checkpoint in {workdir} is of another version of this package (it keeps "
                f"{', '.join(sorted(extra)) or 'nothing'}); go on with that version, or use another --workdir"
            )
        memory = Memory(**extra)
        metrics.say(f"resuming after step {int(state.step)}")
    if memory.source and memory.source != setup.source:
        metrics.say(
            "warning: the data or the reward functions' files have changed since the checkpoint"
        )
    memory = memory._replace(source=setup.source)
    workdirs.write_config(c, workdir)
    table = _costs(c, setup, state, workdir) if rollouts.needs_costs(c) else None
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
    writer = metrics.open_writer(workdir, int(state.step), c.log.tensorboard)
    there = {row["step"] for row in metrics.read(workdir)}
    if len(there) < int(state.step):
        metrics.say(
            f"warning: metrics.jsonl lacks {int(state.step) - len(there)} of the steps so far"
        )
    try:
        with signals_lib.Signals() as signals:
            step = step_lib.make_train_step(setup.step)
            run = Run(
                c, setup, engine, controller, looks_back, step, manager, writer, progress, signals
            )
            state, memory = _steps(run, state, memory)
    finally:
        progress.close()
        metrics.close(writer)
        manager.wait_until_finished()
        manager.close()
    if setup.eagle is not None:
        path = workdir / eagle_file.NAME
        eagle_file.save(path, setup.eagle, jax.device_get(state.drafter), memory.counts)
    _conclude(workdir)


def _conclude(workdir: pathlib.Path) -> None:
    """Say what came of a run, and draw it."""
    rows = metrics.read(workdir)
    metrics.say(f"\n{report.final_summary(rows)}\n\ncurves: {report.write_png(workdir)}")


def _steps(run: Run, state: base.TrainState, memory: Memory) -> tuple[base.TrainState, Memory]:
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
            played = _play(run, state, memory)
            run.progress.phase("training")
            run.signals.check()
        except BaseException:  # a signal, a reward that fails, a bad row: the state is whole
            if number:
                save()
            raise
        row, learning = played.metrics, time.perf_counter()
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
    run: Run, state: base.TrainState, memory: Memory, number: int
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


class Played(NamedTuple):
    """A rollout with its rewards, ready to train on."""

    batch: step_lib.StepBatch
    metrics: dict[str, float]
    completions: list[dict[str, Any]]
    memory: Memory


class Round(NamedTuple):
    """P prompts, answered and scored."""

    answers: answers_lib.Answers
    rollout: generate.Rollout
    changed: int  # prompts that were dropped or truncated
    reward_seconds: float


def _play(run: Run, state: base.TrainState, memory: Memory) -> Played:
    """Answer the next prompts and score the answers; metrics are of all that was answered."""
    c, setup = run.config, run.setup
    began, count, group = time.perf_counter(), c.task.prompts_per_step, c.task.group
    weights = rollouts.weights(c, setup, state, memory.counts)
    rounds, teaches = [], np.zeros(0, bool)
    while teaches.sum() < count and len(rounds) <= c.task.resample_max:
        one, memory = _round(run, weights, int(state.step), memory)
        rounds.append(one)
        found = resample.informative(one.answers.scores.total.reshape(count, group))
        teaches = np.concatenate([teaches, found])
    renewed = run.controller.renew(memory.controller)  # the step changes the weights
    memory = memory._replace(controller=renewed)
    elapsed = time.perf_counter() - began
    everything = answers_lib.punish(
        answers_lib.join([one.answers for one in rounds]),
        setup.limits.response,
        setup.limits.total,
        c.reward.overlong_buffer,
        c.reward.overlong_factor,
    )
    groups = resample.choose(teaches, count)
    kept = answers_lib.take(everything, groups) if len(rounds) > 1 else everything
    row = _describe(run, everything, generate.joined([one.rollout for one in rounds]), memory)
    if weights.draft_ids is not None:
        ids = np.asarray(weights.draft_ids)
        row["drafter/vocab_coverage"] = draft_vocab.coverage(ids, base.responses(everything.batch))
    row["data/overlong"] = float(sum(one.changed for one in rounds))
    row["timing_s/reward"] = sum(one.reward_seconds for one in rounds)
    row["timing_s/rollout"] = elapsed - row["timing_s/reward"]
    if c.task.resample_max:
        row["resample/rounds"] = float(len(rounds) - 1)
        row["resample/replaced"] = float(sum(i >= count for i in groups))
    totals = kept.scores.total.reshape(count, group)
    advantages = grpo.advantages(totals, c.loss.advantage_scale).reshape(-1)
    packed = _pack(run, kept.batch) if c.optim.token_budget else None
    row |= packing.statistics(packed) if packed else {}
    return Played(
        answers_lib.step_batch(
            kept.batch,
            advantages,
            c.sampling.temperature,
            c.loss.mask_truncated,
            weights.draft_ids,
            packed,
        ),
        row,
        answers_lib.lines(kept, advantages, c.log.completions_per_step),
        memory,
    )


def _pack(run: Run, batch: base.RolloutBatch):
    group, budget = run.config.task.group, run.config.optim.token_budget
    longest = run.setup.limits.total
    return packing.pack(batch.prompt_length, batch.length, group, longest, budget)


def _round(run: Run, weights: speculate.Weights, step: int, memory: Memory) -> tuple[Round, Memory]:
    """Take the next P prompts of the data stream, answer and score them."""
    c, setup = run.config, run.setup
    prompts, cursor, changed = data.take(
        setup.task, memory.cursor, c.task.prompts_per_step, setup.rendering
    )
    rollout = _answer(run, weights, prompts, step, memory)
    rolled = time.perf_counter()
    run.progress.phase("rewards")
    answers = answers_lib.score(
        setup.rewards, setup.model.tokenizer, prompts, rollout.batch, c.reward.on_error
    )
    seconds = time.perf_counter() - rolled
    memory = _remember(run, memory, prompts, rollout, step, weights.draft_ids is not None)
    return Round(answers, rollout, changed, seconds), memory._replace(cursor=cursor)


def _describe(
    run: Run, answers: answers_lib.Answers, rollout: generate.Rollout, memory: Memory
) -> dict[str, float]:
    """Compute the metrics of rewards, lengths and speculation."""
    batch, scores = answers.batch, answers.scores
    row = metrics.summarise(
        scores.total,
        scores.parts,
        run.config.task.group,
        batch.length - batch.prompt_length,
        batch.stopped,
        memory.num_tokens,
    )
    return row | generate.statistics(rollout) | {"reward/failures": float(scores.failures)}


def _answer(
    run: Run, weights: speculate.Weights, prompts, step: int, memory: Memory
) -> generate.Rollout:
    """Roll out the prompts of a step, with what is remembered of them."""
    c, setup = run.config, run.setup
    ids = tuple(p.ids for p in prompts)
    if run.looks_back:
        earlier = rollouts.recall(c, run.engine, memory.corpus, ids)
        weights = weights._replace(earlier=earlier)

    def look(live: int) -> None:
        run.signals.check()
        run.progress.phase(f"rollout, {live} rows left")

    request = generate.Request(
        ids,
        tuple(p.place for p in prompts),
        c.seed,
        step,
        lengths.expect(memory.lengths, ids) if run.waits else None,
    )
    return generate.rollout(
        run.engine,
        weights,
        request,
        setup.sampling,
        setup.limits,
        run.controller,
        look,
        memory.controller,
    )


def _remember(
    run: Run, memory: Memory, prompts, rollout: generate.Rollout, step: int, counting: bool
) -> Memory:
    """Add a rollout to what later ones go by; emitted ids are counted for a draft vocabulary."""
    c, batch = run.config, rollout.batch
    ids, emitted = tuple(p.ids for p in prompts), base.responses(batch)
    said = [[len(row) for row in emitted[i : i + c.task.group]]
            for i in range(0, len(emitted), c.task.group)]  # fmt: skip
    return memory._replace(
        num_tokens=memory.num_tokens + int(batch.length.sum()),
        controller=rollout.memory,
        counts=draft_vocab.count(emitted, memory.counts) if counting else {},
        lengths=lengths.learn(memory.lengths, ids, said) if run.waits else {},
        corpus=rollouts.remember(c, memory.corpus, ids, batch) if run.looks_back else {},
        replay=replay.add(memory.replay, step, batch, c.drafter.replay_tokens)
        if run.studies
        else [],
    )


def _costs(c, setup, state: base.TrainState, workdir: pathlib.Path) -> costs.Table:
    """Read the run's cost table, or measure it at the run's first start.

    It stays with the run, so that a resumed one decides as one that was never stopped.
    """
    table = costs.load(workdir / COSTS)
    if table is not None:
        if table.device != calibrate.device():
            metrics.say(f"warning: {workdir / COSTS} is of another machine ({table.device})")
        return table

    def measure() -> costs.Table:
        metrics.say(f"measuring what rounds cost here, for about {c.rollout.measure_seconds:.0f} s")
        weights = rollouts.weights(c, setup, state, {})
        budget_s = c.rollout.measure_seconds
        return calibrate.measure(setup.model.config, setup.eagle, weights, budget_s=budget_s)

    about = f"{setup.model.config} {setup.eagle} {c.drafter.vocab}"
    table = calibrate.cached(c.compilation_cache, about, measure)
    costs.save(workdir / COSTS, table)
    return table


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
