"""Rollouts that are cut and go on: law 1, D25."""

import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.rollout import engine as engine_lib
from tests.rollout import toys

ANYWHERE = engine_lib.Limits(toys.LIMITS.total - 1, toys.LIMITS.response, toys.LIMITS.total)


LEFT = (toys.LIMITS.response - 4,) * toys.ROWS


def engine(rows=(4, toys.ROWS)) -> engine_lib.Engine:
    return engine_lib.make_engine(
        toys.SPEC,
        rows=rows,
        total=toys.ROWS,
        limits=ANYWHERE,
        stop_tokens=(toys.STOP,),
        slot_step=48,
        rounds=4,
        span=toys.DEEPEST_SPAN,
    )


def cut_at(said: base.RolloutBatch, tokens: int):
    """List what each row has said when so many response tokens are there, and which are done."""
    end = np.minimum(said.length, said.prompt_length + tokens)
    starts = [tuple(row[:n].tolist()) for row, n in zip(said.tokens, end)]
    done = tuple((end == said.length).tolist())
    prompts = [tuple(row[:n].tolist()) for row, n in zip(said.tokens, said.prompt_length)]
    return tuple(p if d else s for p, s, d in zip(prompts, starts, done)), done


@pytest.mark.parametrize("text", ["off", "learned:3:3:8", "ngram:3:1:4"])
def test_a_row_that_goes_on_says_what_it_would_have_said(text):
    """Cut after four tokens and gone on in the same step, by any strategy: the uncut rollout's
    tokens and log-probs; rows that were done are left alone, and hold no seat."""
    whole = toys.plain().batch
    made, controller = engine(), toys.fixed(text)
    more = dict(limits=ANYWHERE, controller=controller)
    request = toys.REQUEST._replace(caps=(4,) * toys.ROWS)
    first = toys.rollout(made, toys.weights(), request=request, **more).batch
    starts, done = cut_at(whole, 4)
    assert 0 < sum(done) < toys.ROWS
    np.testing.assert_array_equal(first.length, np.minimum(whole.length, whole.prompt_length + 4))
    request = toys.REQUEST._replace(starts=starts, done=done, caps=LEFT)
    run = toys.rollout(made, toys.weights(), request=request, **more)
    second = run.batch
    assert max(block.live for block in run.blocks) == toys.ROWS - sum(done)
    for i in range(toys.ROWS):
        if done[i]:
            assert second.length[i] == second.prompt_length[i] == whole.prompt_length[i]
            continue
        start, end = len(starts[i]), whole.length[i]
        assert (second.prompt_length[i], second.length[i]) == (start, end)
        np.testing.assert_array_equal(second.tokens[i, :end], whole.tokens[i, :end])
        joined = np.concatenate([first.logps[i, :start], second.logps[i, start:end]])
        np.testing.assert_allclose(joined, whole.logps[i, :end], rtol=1e-5)
        assert second.stopped[i] == whole.stopped[i]


def test_what_follows_is_of_the_step_that_says_it():
    starts, done = cut_at(toys.plain().batch, 4)
    request = toys.REQUEST._replace(starts=starts, done=done, caps=LEFT)
    runs = [
        toys.rollout(
            engine((toys.ROWS,)), toys.weights(), toys.fixed("off"),
            request=request._replace(step=step), limits=ANYWHERE,
        ).batch
        for step in (toys.REQUEST.step, toys.REQUEST.step + 1)
    ]  # fmt: skip
    same = [np.array_equal(a, b) for a, b, d in zip(*(r.tokens for r in runs), done) if not d]
    assert not any(same)


def test_nothing_runs_where_all_are_done():
    request = toys.REQUEST._replace(done=(True,) * toys.ROWS)
    run = toys.rollout(engine(), toys.weights(), toys.fixed("off"), request=request)
    assert not run.blocks and np.array_equal(run.batch.length, run.batch.prompt_length)


def test_rows_that_wait_are_those_that_go_on():
    """Fewer seats than rows: each goes on from its own start when it is admitted."""
    whole = toys.plain().batch
    starts, done = cut_at(whole, 4)
    request = toys.REQUEST._replace(starts=starts, done=done, caps=LEFT)
    run = toys.rollout(
        engine((2,)), toys.weights(), toys.fixed("learned:2:1:3"), request=request, limits=ANYWHERE
    )
    for i in np.flatnonzero(~np.array(done)):
        np.testing.assert_array_equal(run.batch.tokens[i], whole.tokens[i])
