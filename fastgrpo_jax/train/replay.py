"""Sequences that the drafter learns from again: a bounded buffer, and updates on draws from it.

A long answer takes a rollout's last half, of which the drafter sees little in the step's own
batch; so long sequences are kept longest and drawn most (as TLT's data buffer does, arXiv
2511.16665). The policy has changed since they were sampled, so it reads them anew: targets are
always of the policy as it is.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base, sharding
from fastgrpo_jax.train import drafter, forward, step
from fastgrpo_jax.train.layout import StepBatch

LESSON = 8  # sequences of an update

# [step, prompt tokens, response tokens]; plain numbers, which a checkpoint keeps.
Buffer = list[list]


def add(buffer: Buffer, number: int, batch: base.RolloutBatch, tokens: int) -> Buffer:
    """Add the sequences of step `number`; `tokens`, prompts included, are kept.

    What is too much goes by age, of one step the shortest answers first. Empty answers never
    enter.
    """
    rows = [
        [number, row[:start].tolist(), row[start:end].tolist()]
        for row, start, end in zip(np.asarray(batch.tokens), batch.prompt_length, batch.length)
        if end > start
    ]
    kept = sorted([*buffer, *rows], key=lambda row: (row[0], len(row[2])))
    over = sum(len(prompt) + len(said) for _, prompt, said in kept) - tokens
    while kept and over > 0:
        _, prompt, said = kept.pop(0)
        over -= len(prompt) + len(said)
    return kept


def draw(buffer: Buffer, count: int, rng: np.random.Generator) -> Buffer:
    """Draw sequences without replacement, each as likely as its answer is long."""
    size = np.array([len(said) for _, _, said in buffer], float)
    count = min(count, len(buffer))
    return [buffer[i] for i in rng.choice(len(buffer), count, replace=False, p=size / size.sum())]


def lesson(rows: Buffer, count: int, span: int) -> StepBatch:
    """Lay sequences out as a batch of a fixed shape, [count, span]; what is missing is empty."""
    tokens = np.zeros((count, span), np.int32)
    ends = np.ones((2, count), np.int32)  # of prompt and sequence
    for i, (_, prompt, said) in enumerate(rows):
        tokens[i, : len(prompt) + len(said)] = [*prompt, *said]
        ends[:, i] = len(prompt), len(prompt) + len(said)
    return StepBatch(
        tokens=jnp.asarray(tokens),
        prompt_length=jnp.asarray(ends[0]),
        length=jnp.asarray(ends[1]),
        logps=jnp.zeros(tokens.shape, jnp.float32),
        advantages=jnp.zeros(count, jnp.float32),
        temperature=jnp.ones(count, jnp.float32),
    )


class Studied(NamedTuple):
    """A drafter after some updates, and their mean loss (NaN without any)."""

    state: drafter.State
    loss: float
    updates: int


def study(
    config: drafter.Config,
    policy: base.Params,
    frozen: drafter.Frozen,
    state: drafter.State,
    buffer: Buffer,
    updates: int,
    rng: np.random.Generator,
) -> Studied:
    """Update a drafter on draws from the buffer, one pass over each draw."""
    frame, losses = config.frame, []
    span = frame.max_prompt + frame.max_response
    for _ in range(updates if buffer else 0):
        batch = lesson(draw(buffer, LESSON, rng), LESSON, span)
        batch = sharding.put(config.frame.policy.mesh, batch)
        state, loss = drafter.update(config, frozen, state, drafter.read(config, policy, batch))
        losses.append(loss)
    return Studied(state, float(np.mean(losses)) if losses else float("nan"), len(losses))


def config_for(config: step.StepConfig) -> drafter.Config:
    """Take what a train step learns its drafter by, for single sequences."""
    return drafter.Config(
        forward.Frame(config.policy, 1, config.max_prompt, config.max_response),
        config.eagle,
        config.drafter_optim,
        config.distill,
        config.head_chunk,
    )
