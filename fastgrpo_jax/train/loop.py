"""The training loop: prompts, rollout, rewards, step, files.

All steps run the same executables. Whatever decides the next step (weights, optimisers, the
place in the data) is in the checkpoint; noise and data order are addressed by seed and place,
so a resumed run goes on as if it had not stopped.
"""

import json
import os
import pathlib
import signal
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.rollout import calibrate, corpus, costs, draft_vocab, generate, strategy
from fastgrpo_jax.rollout import pool as pool_lib
from fastgrpo_jax.train import checkpoint, data, grpo, lengths, metrics, report, rewards
from fastgrpo_jax.train import setup as setup_lib
from fastgrpo_jax.train import step as step_lib

COSTS = "costs.json"
_IDLE_STEPS = (3, 10, 30, 100, 300, 1000)  # in a row without an advantage: a warning comes
# Keys that a resumed run may change; the others shape what has been learned.
HARMLESS = (
    "steps",
    "log.",
    "checkpoint.",
    "compilation_cache",
    "reward.on_error",
    "task.overlong_prompt",
)
_SKIPPED = 10  # updates in a row that were not finite: the run ends


class Interrupted(Exception):
    """Ctrl-C or SIGTERM arrived; steps that were finished are saved."""


class Signals:
    """Notes Ctrl-C and SIGTERM while it is entered; a second one acts at once, as usual."""

    def __init__(self):
        self.caught = None
        self.before = {}

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_):
        self._release()

    def _release(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _catch(self, number, frame):
        self.caught = signal.Signals(number)
        for each in self.before:  # ends even a long compilation
            signal.signal(each, signal.SIG_DFL)
        os.write(2, f"\n{self.caught.name}: saving soon; again to stop at once\n".encode())

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.caught is not None:
            raise Interrupted(self.caught.name)


class Run(NamedTuple):
    """The fixed parts of a running training."""

    config: Any
    setup: setup_lib.Setup
    engine: generate.Engine
    controller: strategy.Controller
    train_step: Any
    manager: Any
    writer: metrics.Writer
    progress: metrics.Progress
    signals: Signals


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
      Interrupted: after a signal, once the last finished step is saved.
    """
    workdir = pathlib.Path(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise base.UserError(f"--workdir is {str(workdir)!r}: {error.strerror}") from error
    _check_same_run(c, workdir)
    if max(checkpoint.steps(workdir), default=-1) >= c.steps:
        say(f"all {max(checkpoint.steps(workdir))} steps are done; raise --config.steps to go on")
        _conclude(workdir)
        return
    say(f"loading {c.model.name}")
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
        say(f"resuming after step {int(state.step)}")
    if memory.source and memory.source != setup.source:
        say("warning: the data or the reward functions' files have changed since the checkpoint")
    memory = memory._replace(source=setup.source)
    _write_config(c, workdir)
    table = _costs(c, setup, state, workdir) if setup_lib.needs_costs(c) else None
    controller = setup_lib.controller(c, setup, table)
    engine = setup_lib.engine(c, setup, controller)
    _announce(c, setup, engine, controller, table)
    if c.rollout.warmup:
        say(f"compiling the decode blocks, {c.rollout.warmup} at a time")
        weights = setup_lib.weights(c, setup, state, memory.counts)
        if setup_lib.looks_back(c, engine, controller):
            nobody = [()] * c.task.prompts_per_step
            weights = weights._replace(earlier=setup_lib.recall(c, engine, {}, nobody))
        generate.warm_up(engine, weights, controller, c.rollout.warmup)
    progress = metrics.Progress(c.steps, int(state.step))
    engine.pool.on_compile = lambda key: progress.phase(f"compiling {key[0]}")
    writer = metrics.open_writer(workdir, int(state.step), c.log.tensorboard)
    there = {row["step"] for row in metrics.read(workdir)}
    if len(there) < int(state.step):
        say(f"warning: metrics.jsonl lacks {int(state.step) - len(there)} of the steps so far")
    try:
        with Signals() as signals:
            step = step_lib.make_train_step(setup.step)
            run = Run(c, setup, engine, controller, step, manager, writer, progress, signals)
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
    say(f"\n{report.final_summary(rows)}\n\ncurves: {report.write_png(workdir)}")


def say(text: str) -> None:
    """Tell the user on stderr, where the progress is too."""
    print(text, file=sys.stderr, flush=True)


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

    weights = setup_lib.weights(c, setup, state, memory.counts)
    ids = tuple(p.ids for p in prompts)
    waits = run.engine.total > run.engine.rows[-1]
    looks_back = setup_lib.looks_back(c, run.engine, run.controller)
    if looks_back:
        earlier = setup_lib.recall(c, run.engine, memory.corpus, ids)
        weights = weights._replace(earlier=earlier)

    def look(live: int) -> None:
        run.signals.check()
        run.progress.phase(f"rollout, {live} rows left")

    rollout = generate.rollout(
        run.engine,
        weights,
        generate.Request(
            ids,
            tuple(p.place for p in prompts),
            c.seed,
            int(state.step),
            lengths.expect(memory.lengths, ids) if waits else None,
        ),
        setup.sampling,
        setup.limits,
        run.controller,
        look,
        memory.controller,
    )
    rolled = time.perf_counter()
    run.progress.phase("rewards")
    batch = rollout.batch
    scores, texts = _score(c, setup, prompts, batch)
    num_tokens = memory.num_tokens + int(batch.length.sum())
    said = batch.length - batch.prompt_length
    row = metrics.summarise(
        scores.total,
        scores.parts,
        c.task.group,
        said,
        batch.stopped,
        num_tokens,
    )
    row |= generate.statistics(rollout)
    counts = {}
    if weights.draft_ids is not None:
        emitted = base.responses(batch)
        covered = draft_vocab.coverage(np.asarray(weights.draft_ids), emitted)
        row["drafter/vocab_coverage"] = covered
        counts = draft_vocab.count(emitted, memory.counts)
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
        memory._replace(
            cursor=cursor,
            num_tokens=num_tokens,
            controller=run.controller.renew(rollout.memory),  # the step changes the weights
            counts=counts,
            lengths=lengths.learn(memory.lengths, ids, said.reshape(len(ids), -1).tolist())
            if waits
            else {},
            corpus=setup_lib.remember(c, memory.corpus, ids, batch) if looks_back else {},
        ),
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
            say(f"warning: {workdir / COSTS} is of another machine ({table.device})")
        return table

    def measure() -> costs.Table:
        say(f"measuring what rounds cost here, for about {c.rollout.measure_seconds:.0f} s")
        weights = setup_lib.weights(c, setup, state, {})
        budget_s = c.rollout.measure_seconds
        return calibrate.measure(setup.model.config, setup.eagle, weights, budget_s=budget_s)

    about = f"{setup.model.config} {setup.eagle} {c.drafter.vocab}"
    table = calibrate.cached(c.compilation_cache, about, measure)
    costs.save(workdir / COSTS, table)
    return table


def _announce(c, setup, engine, controller, table: costs.Table | None) -> None:
    """Say what will run, and list what will be compiled."""
    keys = generate.programs(engine, controller)
    engine.pool.expected = frozenset(keys)
    plan = ", ".join(
        f"{rows}: {' | '.join(map(str, controller.possible(rows)))}" for rows in engine.rows
    )
    knee = (
        f", C_peak {c.rollout.c_peak or costs.c_peak(table)}" if table or c.rollout.c_peak else ""
    )
    if c.sampling.temperature == 0:
        say(
            "warning: sampling.temperature is 0, so all completions of a group are equal, every "
            "advantage is 0 and the policy cannot learn"
        )
    say(
        f"model {setup.model.source}, {base.tree_bytes(setup.model.params) / 4e6:.1f}M parameters\n"
        f"{c.task.prompts_per_step} prompts x {c.task.group} completions a step, at most "
        f"{setup.limits.response} tokens each; {c.steps} steps\n"
        f"controller {controller.name}{knee}; draft strategies by live rows: {plan}\n"
        f"programs that may be compiled: {len(keys)} for {len(engine.rows)} row counts and slots "
        f"{', '.join(map(str, engine.slots))}, and the train step"
    )


def _write_config(c, workdir: pathlib.Path) -> None:
    part = workdir / "config.json.part"
    part.write_text(json.dumps(c.to_dict(), indent=1) + "\n")
    os.replace(part, workdir / "config.json")


def _flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    out = {}
    for name, value in tree.items():
        path = prefix + name
        out |= _flat(value, path + ".") if isinstance(value, dict) else {path: value}
    return out


def _check_same_run(c, workdir: pathlib.Path) -> None:
    """Refuse to go on in a workdir whose run had another config, harmless keys apart.

    Raises:
      UserError: showing each difference.
    """
    path = workdir / "config.json"
    if not checkpoint.steps(workdir):
        return
    if not path.exists():
        say(f"warning: {path} is missing, so that this config cannot be compared with the run's")
        return
    try:
        before = json.loads(path.read_text())
        if not isinstance(before, dict):
            raise ValueError("not an object")
        before = _flat(before)
    except ValueError as error:
        raise base.UserError(f"{path} is no config ({error}); restore it or remove it") from error
    now = _flat(c.to_dict())
    changed = [
        f"  {name}: {before.get(name, '(absent)')!r} -> {now.get(name, '(absent)')!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not name.startswith(HARMLESS)
    ]
    if changed:
        raise base.UserError(
            f"{workdir} holds a run with another config:\n" + "\n".join(changed) + "\n"
            "use another --workdir, or the config it began with (these may change: "
            f"{', '.join(HARMLESS).replace('., ', '.*, ')})"
        )
