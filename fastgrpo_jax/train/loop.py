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
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
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
from fastgrpo_jax.train import (
    checkpoint,
    data,
    grpo,
    lengths,
    metrics,
    report,
    rewards,
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
    memory = Memory(0, 0, {}, setup.counts, {}, {}, "")
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
            _steps(run, state, memory)
    finally:
        progress.close()
        metrics.close(writer)
        manager.wait_until_finished()
        manager.close()
    _conclude(workdir)


def _conclude(workdir: pathlib.Path) -> None:
    """Say what came of a run, and draw it."""
    rows = metrics.read(workdir)
    metrics.say(f"\n{report.final_summary(rows)}\n\ncurves: {report.write_png(workdir)}")


def _steps(run: Run, state: base.TrainState, memory: Memory) -> None:
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
        state, learned = run.train_step(state, played.batch)
        row |= {name: float(value) for name, value in jax.device_get(learned).items()}
        row["timing_s/train"] = time.perf_counter() - learning
        row.setdefault("drafter/steps", 0.0)
        memory = played.memory
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


class Played(NamedTuple):
    """A rollout with its rewards, ready to train on."""

    batch: step_lib.StepBatch
    metrics: dict[str, float]
    completions: list[dict[str, Any]]
    memory: Memory


def _play(run: Run, state: base.TrainState, memory: Memory) -> Played:
    """Answer the next prompts and score the answers."""
    c, setup = run.config, run.setup
    began = time.perf_counter()
    prompts, cursor, changed = data.take(
        setup.task, memory.cursor, c.task.prompts_per_step, setup.rendering
    )
    weights = rollouts.weights(c, setup, state, memory.counts)
    rollout = _answer(run, weights, prompts, int(state.step), memory)
    rolled = time.perf_counter()
    run.progress.phase("rewards")
    batch = rollout.batch
    scores, texts = _score(c, setup, prompts, batch)
    memory = _remember(run, memory, prompts, rollout, weights.draft_ids is not None)
    row = metrics.summarise(
        scores.total,
        scores.parts,
        c.task.group,
        batch.length - batch.prompt_length,
        batch.stopped,
        memory.num_tokens,
    )
    row |= generate.statistics(rollout)
    if weights.draft_ids is not None:
        ids = np.asarray(weights.draft_ids)
        row["drafter/vocab_coverage"] = draft_vocab.coverage(ids, base.responses(batch))
    row |= {
        "reward/failures": float(scores.failures),
        "data/overlong": float(changed),
        "timing_s/rollout": rolled - began,
        "timing_s/reward": time.perf_counter() - rolled,
    }
    groups = scores.total.reshape(-1, c.task.group)
    advantages = grpo.advantages(groups, c.loss.advantage_scale).reshape(-1)
    return Played(
        _step_batch(c, batch, advantages),
        row,
        _completions(c, prompts, texts, scores, advantages, batch),
        memory._replace(cursor=cursor),
    )


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
    run: Run, memory: Memory, prompts, rollout: generate.Rollout, counting: bool
) -> Memory:
    """Add a rollout to what later ones go by; emitted ids are counted for a draft vocabulary."""
    c, batch = run.config, rollout.batch
    ids, emitted = tuple(p.ids for p in prompts), base.responses(batch)
    said = [[len(row) for row in emitted[i : i + c.task.group]]
            for i in range(0, len(emitted), c.task.group)]  # fmt: skip
    return memory._replace(
        num_tokens=memory.num_tokens + int(batch.length.sum()),
        controller=run.controller.renew(rollout.memory),  # the step changes the weights
        counts=draft_vocab.count(emitted, memory.counts) if counting else {},
        lengths=lengths.learn(memory.lengths, ids, said) if run.waits else {},
        corpus=rollouts.remember(c, memory.corpus, ids, batch) if run.looks_back else {},
    )


def _score(c, setup, prompts, batch: base.RolloutBatch) -> tuple[rewards.Scores, list[str]]:
    ids = base.responses(batch)
    texts = [setup.model.tokenizer.decode(x, skip_special_tokens=True) for x in ids]
    group = c.task.group
    scores = rewards.score(
        setup.rewards,
        [p.prompt for p in prompts for _ in range(group)],
        texts,
        ids,
        data.repeated_columns(prompts, group),
        c.reward.on_error,
    )
    return scores, texts


def _step_batch(c, batch: base.RolloutBatch, advantages) -> step_lib.StepBatch:
    return step_lib.StepBatch(
        tokens=jnp.asarray(batch.tokens),
        prompt_length=jnp.asarray(batch.prompt_length),
        length=jnp.asarray(batch.length),
        logps=jnp.asarray(batch.logps),
        advantages=jnp.asarray(advantages),
        temperature=jnp.full(len(advantages), c.sampling.temperature, jnp.float32),
        kept=jnp.asarray(batch.stopped) if c.loss.mask_truncated else None,
    )


def _completions(c, prompts, texts, scores, advantages, batch) -> list[dict[str, Any]]:
    group = c.task.group
    return [
        {
            "place": prompts[i // group].place,
            "sample": i % group,
            "prompt": prompts[i // group].text,
            "completion": texts[i],
            "reward": float(scores.total[i]),
            "advantage": float(advantages[i]),
            "tokens": int(batch.length[i] - batch.prompt_length[i]),
            "stopped": bool(batch.stopped[i]),
        }
        for i in range(min(c.log.completions_per_step, len(texts)))
    ]


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
    metrics.say(
        f"model {setup.model.source}, {base.tree_bytes(setup.model.params) / 4e6:.1f}M parameters\n"
        f"{c.task.prompts_per_step} prompts x {c.task.group} completions a step, at most "
        f"{setup.limits.response} tokens each; {c.steps} steps\n"
        f"controller {controller.name}{knee}; draft strategies by live rows: {plan}\n"
        f"programs that may be compiled: {len(keys)} for {len(engine.rows)} row counts and slots "
        f"{', '.join(map(str, engine.slots))}, and the train step"
    )
