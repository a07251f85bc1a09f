"""Answered and scored prompts: what lies between a rollout and the step that trains on it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from fastgrpo_jax import base, hosts
from fastgrpo_jax.train import data, layout, overlong, rewards

OVERLONG = "soft_overlong_punishment"  # its metrics' name, TRL's


class Answers(NamedTuple):
    """Groups of rows, row = prompt * G + sample, with their texts and rewards.

    ages: updates of the policy since each row was begun; None: all 0.
    """

    prompts: list[data.Prompt]
    batch: base.RolloutBatch
    scores: rewards.Scores
    texts: list[str]
    ages: Int[np.ndarray, " N"] | None = None


def score(
    functions: Sequence[rewards.Reward],
    tokenizer: Any,
    prompts: list[data.Prompt],
    batch: base.RolloutBatch,
    on_error: str,
) -> Answers:
    """Score a rollout by the run's reward functions; `on_error` as in `rewards.score`.

    Of several processes each scores some groups, and tells the others.
    """
    ids = base.responses(batch)
    group = len(ids) // len(prompts)
    some = hosts.share(range(len(prompts)))

    def own() -> tuple[rewards.Scores, list[str]] | None:
        if not some:
            return None
        asked, said = [prompts[i] for i in some], ids[some[0] * group : (some[-1] + 1) * group]
        texts = [tokenizer.decode(x, skip_special_tokens=True) for x in said]
        rows = [p.prompt for p in asked for _ in range(group)]
        columns = data.repeated_columns(asked, group)
        return rewards.score(functions, rows, texts, said, columns, on_error), texts

    scores, texts = zip(*filter(None, hosts.exchange(hosts.together(own))))
    return Answers(prompts, batch, _all(scores), [text for part in texts for text in part])


def punish(answers: Answers, response: int, total: int, buffer: int, factor: float) -> Answers:
    """Add the soft overlong penalty, times a factor, to the rewards; a buffer of 0 adds nothing.

    `response` and `total` are the limits of a response and of a sequence, in tokens.
    """
    if not buffer:
        return answers
    batch, scores = answers.batch, answers.scores
    most = np.minimum(response, total - batch.prompt_length)
    part = overlong.penalty(batch.length - batch.prompt_length, most, buffer)
    parts = {**scores.parts, OVERLONG: part}
    return answers._replace(scores=scores._replace(total=scores.total + factor * part, parts=parts))


def join(rounds: Sequence[Answers]) -> Answers:
    """Join rounds in their order."""
    if len(rounds) == 1:
        return rounds[0]
    return Answers(
        [prompt for x in rounds for prompt in x.prompts],
        base.RolloutBatch(*(np.concatenate(x) for x in zip(*(x.batch for x in rounds)))),
        _all([x.scores for x in rounds]),
        [text for x in rounds for text in x.texts],
    )


def _all(scores: Sequence[rewards.Scores]) -> rewards.Scores:
    """Join the scores of rows that follow one another."""
    return rewards.Scores(
        np.concatenate([s.total for s in scores]),
        {name: np.concatenate([s.parts[name] for s in scores]) for name in scores[0].parts},
        sum(s.failures for s in scores),
    )


def take(answers: Answers, groups: Sequence[int]) -> Answers:
    """Take some groups; failures are those of all."""
    group = len(answers.texts) // len(answers.prompts)
    rows = (np.asarray(groups)[:, None] * group + np.arange(group)).reshape(-1)
    scores = answers.scores
    return Answers(
        [answers.prompts[i] for i in groups],
        base.RolloutBatch(*(x[rows] for x in answers.batch)),
        scores._replace(
            total=scores.total[rows], parts={k: x[rows] for k, x in scores.parts.items()}
        ),
        [answers.texts[i] for i in rows],
    )


def step_batch(
    batch: base.RolloutBatch,
    advantages: Float[np.ndarray, " N"],
    temperature: float,
    only_stopped: bool,
    ages: Int[np.ndarray, " N"] | None = None,
) -> layout.StepBatch:
    """Hand a rollout to the train step; `only_stopped` keeps truncated rows out of the loss."""
    return layout.StepBatch(
        tokens=jnp.asarray(batch.tokens),
        prompt_length=jnp.asarray(batch.prompt_length),
        length=jnp.asarray(batch.length),
        logps=jnp.asarray(batch.logps),
        advantages=jnp.asarray(advantages),
        temperature=jnp.full(len(advantages), temperature, jnp.float32),
        kept=jnp.asarray(batch.stopped) if only_stopped else None,
        staleness=None if ages is None else jnp.asarray(ages),
    )


def lines(answers: Answers, advantages: Float[np.ndarray, " N"], most: int) -> list[dict[str, Any]]:
    """Make the first lines of a step in completions.jsonl, `most` at most."""
    group, batch = len(answers.texts) // len(answers.prompts), answers.batch
    return [
        {
            "place": answers.prompts[i // group].place,
            "sample": i % group,
            "prompt": answers.prompts[i // group].text,
            "completion": answers.texts[i],
            "reward": float(answers.scores.total[i]),
            "advantage": float(advantages[i]),
            "tokens": int(batch.length[i] - batch.prompt_length[i]),
            "stopped": bool(batch.stopped[i]),
        }
        for i in range(min(most, len(answers.texts)))
    ]
