"""Partial rollouts: groups whose answers take longer than a step's share of tokens.

A step adds so many tokens to a row at most (`rollout.segment`); a group with a row that goes on
keeps its seat in the next step, whose policy reads what was said and goes on from there (as in
Kimi k1.5, arXiv 2501.12599). Where a row is cut is a matter of token counts alone. A token's noise is that
of the step that sampled it; its log-prob is of the policy that did. The loss takes the row's age
into account (A-3PO, see `ratios`).

What is carried is plain numbers, which a checkpoint keeps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.train import data


class Row(NamedTuple):
    """What a row has said so far: response tokens, their log-probs and kept masses."""

    tokens: list[int]
    logps: list[float]
    masses: list[float]
    stopped: bool
    done: bool


class Group(NamedTuple):
    """The answers to a prompt; `step` began them."""

    place: int
    step: int
    rows: list[Row]


def read(kept: list) -> list[Group]:
    """Read what a checkpoint kept."""
    return [Group(place, step, [Row(*row) for row in rows]) for place, step, rows in kept]


def fresh(prompts: Sequence[data.Prompt], step: int, group: int) -> list[Group]:
    """Make the groups of new prompts, which have said nothing."""
    return [Group(p.place, step, [Row([], [], [], False, False)] * group) for p in prompts]


def starts(groups: Sequence[Group], prompts: Sequence[data.Prompt]) -> tuple[tuple[int, ...], ...]:
    """List what each row goes on from; a row that is done, from its prompt, to which nothing is
    added."""
    return tuple(
        (*p.ids, *(() if row.done else row.tokens))
        for g, p in zip(groups, prompts)
        for row in g.rows
    )


def done(groups: Sequence[Group]) -> tuple[bool, ...]:
    return tuple(row.done for g in groups for row in g.rows)


def caps(groups: Sequence[Group], response: int, segment: int) -> tuple[int, ...]:
    """Limit each row's new tokens: those of a segment, and of what a response may have."""
    return tuple(max(min(segment, response - len(row.tokens)), 0) for g in groups for row in g.rows)


def advance(
    groups: Sequence[Group],
    prompts: Sequence[data.Prompt],
    said: base.RolloutBatch,
    response: int,
    total: int,
) -> list[Group]:
    """Add a rollout's tokens; `response` and `total` are the limits of a response, of a sequence.

    A row is done that stopped, or that has come to a limit.
    """
    found, n = [], 0
    for group, prompt in zip(groups, prompts):
        rows, most = [], min(response, total - len(prompt.ids))
        for row in group.rows:
            if not row.done:
                new = slice(said.prompt_length[n], said.length[n])
                tokens = row.tokens + said.tokens[n, new].tolist()
                stopped = bool(said.stopped[n])
                row = Row(
                    tokens,
                    row.logps + said.logps[n, new].tolist(),
                    row.masses + said.masses[n, new].tolist(),
                    stopped,
                    stopped or len(tokens) >= most,
                )
            rows.append(row)
            n += 1
        found.append(group._replace(rows=rows))
    return found


def finished(group: Group) -> bool:
    return all(row.done for row in group.rows)


def batch(groups: Sequence[Group], prompts: Sequence[data.Prompt], span: int) -> base.RolloutBatch:
    """Lay whole answers out as one rollout's, [rows, span]."""
    rows = [(p.ids, row) for g, p in zip(groups, prompts) for row in g.rows]
    tokens = np.zeros((len(rows), span), np.int32)
    logps, masses = np.zeros((2, len(rows), span), np.float32)
    ends = np.zeros((2, len(rows)), np.int32)
    for i, (prompt, row) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(row.tokens)
        tokens[i, :end] = [*prompt, *row.tokens]
        logps[i, start:end], masses[i, start:end] = row.logps, row.masses
        ends[:, i] = start, end
    stopped = np.array([row.stopped for _, row in rows], bool)
    return base.RolloutBatch(tokens, logps, masses, *ends, stopped)


def ages(groups: Sequence[Group], step: int) -> np.ndarray:
    """Count each row's updates of the policy since it was begun."""
    return np.array([step - g.step for g in groups for _ in g.rows], np.int32)
