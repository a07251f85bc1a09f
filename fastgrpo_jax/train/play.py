"""One step's rollout: the next prompts are answered and scored, and what comes of it is remembered."""

import time
from typing import Any, NamedTuple

import numpy as np

from fastgrpo_jax import base, hosts, sharding
from fastgrpo_jax.rollout import corpus, draft_vocab, generate, inputs, record, speculate, strategy
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.train import answers as answers_lib
from fastgrpo_jax.train import (
    carry,
    data,
    drafter,
    grpo,
    layout,
    lengths,
    metrics,
    packing,
    replay,
    resample,
    rollouts,
)
from fastgrpo_jax.train import setup as setup_lib
from fastgrpo_jax.train import signals as signals_lib
from fastgrpo_jax.train import spot as spot_lib
from fastgrpo_jax.train import step as step_lib


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
    spot: spot_lib.Trainer | None

    @property
    def studies(self) -> bool:
        """Whether the drafter learns from sequences again after each step."""
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
    carried: list[carry.Group]  # that are not answered yet, with rollout.segment
    source: str  # fingerprint of the data and of the rewards' files


class Played(NamedTuple):
    """A rollout with its rewards, ready to train on."""

    batch: step_lib.StepBatch
    metrics: dict[str, float]
    completions: list[dict[str, Any]]
    memory: Memory
    spot: spot_lib.Learned


class Round(NamedTuple):
    """P prompts, answered and scored; with rollout.segment those that are done."""

    answers: answers_lib.Answers
    rollout: record.Rollout
    changed: int  # prompts that were dropped or truncated
    reward_seconds: float


def play(run: Run, state: base.TrainState, memory: Memory) -> Played:
    """Answer the next prompts and score the answers; metrics are of all that was answered."""
    c, setup = run.config, run.setup
    began, count, group = time.perf_counter(), c.task.prompts_per_step, c.task.group
    weights = rollouts.weights(c, setup, state, memory.counts)
    rounds, teaches, learned = [], np.zeros(0, bool), []
    student = drafter.State(state.drafter, state.drafter_opt_state)
    while teaches.sum() < count and len(rounds) <= c.task.resample_max:
        one, memory, taught = _round(run, weights, int(state.step), memory, student)
        rounds.append(one)
        learned.append(taught)
        student = taught.state or student
        found = resample.informative(one.answers.scores.total.reshape(-1, group))
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
    kept, groups = everything, range(count)
    if len(rounds) > 1:
        groups = resample.choose(teaches, count)
        kept = answers_lib.take(everything, groups)
    row = _describe(run, everything, record.joined([one.rollout for one in rounds]), memory)
    if weights.draft_ids is not None:
        ids = np.asarray(weights.draft_ids)
        row["drafter/vocab_coverage"] = draft_vocab.coverage(ids, base.responses(everything.batch))
    row["data/overlong"] = float(sum(one.changed for one in rounds))
    row["timing_s/reward"] = sum(one.reward_seconds for one in rounds)
    row["timing_s/rollout"] = elapsed - row["timing_s/reward"]
    if c.task.resample_max:
        row["resample/rounds"] = float(len(rounds) - 1)
        row["resample/replaced"] = float(sum(i >= count for i in groups))
    if c.rollout.segment:
        row["partial/carried"] = float(len(memory.carried))
        row["partial/age_mean"] = float(kept.ages.mean())
    totals = kept.scores.total.reshape(-1, group)
    advantages = grpo.advantages(totals, c.loss.advantage_scale).reshape(-1)
    batch = answers_lib.step_batch(
        kept.batch, advantages, c.sampling.temperature, c.loss.mask_truncated, kept.ages
    )
    batch = layout.fill(batch, count * group - len(advantages))
    packed = _pack(run, batch) if c.optim.token_budget else None
    row |= packing.statistics(packed) if packed else {}
    row |= spot_lib.metrics(spot_lib.total(learned)) if run.spot else {}
    return Played(
        batch._replace(draft_ids=weights.draft_ids, packed=packed),
        row,
        answers_lib.lines(kept, advantages, c.log.completions_per_step),
        memory,
        spot_lib.total(learned),
    )


def _pack(run: Run, batch: layout.StepBatch):
    lengths = np.asarray(batch.prompt_length), np.asarray(batch.length)
    group, budget = run.config.task.group, run.config.optim.token_budget
    longest = run.setup.limits.total
    devices = sharding.shards(run.setup.step.policy.mesh)
    return packing.pack(*lengths, group, longest, budget, devices)


def _round(
    run: Run, weights: speculate.Weights, step: int, memory: Memory, student: drafter.State
) -> tuple[Round, Memory, spot_lib.Learned]:
    """Take the next P prompts of the data stream, answer and score them. Devices that are idle
    meanwhile teach the drafter."""
    if not run.spot:
        return *_answered(run, weights, step, memory), spot_lib.NOTHING
    rng = np.random.Generator(np.random.Philox([run.config.seed, step, memory.cursor]))
    given = spot_lib.Given(weights.policy, weights.draft_head, student, memory.replay, rng)
    run.spot.prepare(given)
    try:
        found = _answered(run, weights, step, memory)
    except BaseException:
        run.spot.stop()
        raise
    return *found, run.spot.end()


def _answered(
    run: Run, weights: speculate.Weights, step: int, memory: Memory
) -> tuple[Round, Memory]:
    c, setup, count = run.config, run.setup, run.config.task.prompts_per_step
    groups = carry.read(memory.carried)
    prompts = [data.take(setup.task, g.place, 1, setup.rendering)[0][0] for g in groups]
    new, cursor, changed = data.take(
        setup.task, memory.cursor, count - len(groups), setup.rendering
    )
    prompts, ages = prompts + new, None
    if c.rollout.segment:
        groups += carry.fresh(new, step, c.task.group)
        rollout, groups = _continue(run, weights, prompts, groups, step, memory)
        ready = [i for i, g in enumerate(groups) if carry.finished(g)]
        done, prompts = [groups[i] for i in ready], [prompts[i] for i in ready]
        rollout = rollout._replace(batch=carry.batch(done, prompts, setup.limits.total))
        ages = carry.ages(done, step)
        memory = memory._replace(carried=[g for g in groups if not carry.finished(g)])
    else:
        rollout = _answer(run, weights, prompts, step, memory)
    rolled = time.perf_counter()
    run.progress.phase("rewards")
    answers = answers_lib.score(
        setup.rewards, setup.model.tokenizer, prompts, rollout.batch, c.reward.on_error
    )
    seconds = time.perf_counter() - rolled
    memory = _remember(run, memory, prompts, rollout, step, weights.draft_ids is not None)
    answers = answers._replace(ages=ages)
    return Round(answers, rollout, changed, seconds), memory._replace(cursor=cursor)


def _continue(
    run: Run, weights: speculate.Weights, prompts, groups: list[carry.Group], step, memory: Memory
) -> tuple[record.Rollout, list[carry.Group]]:
    """Go on with groups, segment by segment until one of them is done, which one usually is."""
    limits, segment, runs = run.setup.limits, run.config.rollout.segment, []
    while not any(map(carry.finished, groups)):
        more = dict(
            starts=carry.starts(groups, prompts),
            done=carry.done(groups),
            caps=carry.caps(groups, limits.response, segment),
        )
        runs.append(_answer(run, weights, prompts, step, memory, **more))
        memory = memory._replace(controller=runs[-1].memory)
        said = runs[-1].batch
        groups = carry.advance(groups, prompts, said, limits.response, limits.total)
    return record.joined(runs), groups


def _describe(
    run: Run, answers: answers_lib.Answers, rollout: record.Rollout, memory: Memory
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
    return row | record.statistics(rollout) | {"reward/failures": float(scores.failures)}


def _answer(
    run: Run, weights: speculate.Weights, prompts, step: int, memory: Memory, **more
) -> record.Rollout:
    """Roll out the prompts of a step, with what is remembered of them."""
    c, setup = run.config, run.setup
    ids = tuple(p.ids for p in prompts)
    if run.looks_back:
        earlier = rollouts.recall(c, run.engine, memory.corpus, ids)
        weights = weights._replace(earlier=earlier)

    def look(live: int) -> None:
        run.signals.check()
        run.progress.phase(f"rollout, {live} rows left")

    request = inputs.Request(
        ids,
        tuple(p.place for p in prompts),
        c.seed,
        step,
        lengths.expect(memory.lengths, ids) if run.waits else None,
        **more,
    )
    return generate.rollout(
        run.engine,
        weights,
        request,
        setup.sampling,
        rollouts.limits(c, setup),
        run.controller,
        look,
        memory.controller,
        rollouts.agree if hosts.count() > 1 else None,
        run.spot.begin if run.spot else lambda: None,
    )


def _remember(
    run: Run, memory: Memory, prompts, rollout: record.Rollout, step: int, counting: bool
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
        if run.studies or run.spot
        else [],
    )
