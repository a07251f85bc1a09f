"""Learning again from kept sequences, and warming a drafter up while the policy stands still."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle_file
from fastgrpo_jax.train import drafter, loop, metrics, replay
from fastgrpo_jax.train import setup as setup_lib
from tests.train import test_drafter, test_loop

AGAIN = dict(
    drafter__replay_updates=3, drafter__replay_tokens=400, rollout__controller="fixed",
    rollout__strategy="learned:2:1:3",
)  # fmt: skip


def batch(*sizes: tuple[int, int]) -> base.RolloutBatch:
    """Make a rollout of (prompt, answer) lengths; tokens tell row and place."""
    count, span = len(sizes), 12
    tokens = np.arange(count)[:, None] * 100 + np.arange(span)
    start = np.array([p for p, _ in sizes])
    return base.RolloutBatch(
        tokens=tokens, logps=np.zeros((count, span)), masses=np.zeros((count, span)),
        prompt_length=start, length=start + [n for _, n in sizes], stopped=np.ones(count, bool),
    )  # fmt: skip


def test_old_and_short_sequences_leave_the_buffer_first():
    kept = replay.add([], 0, batch((2, 5), (3, 0), (1, 8)), 100)
    assert [row[0] for row in kept] == [0, 0] and [len(row[2]) for row in kept] == [5, 8]
    assert kept[0] == [0, [0, 1], [2, 3, 4, 5, 6]]
    kept = replay.add(kept, 1, batch((2, 3), (2, 6)), 22)
    assert [(row[0], len(row[2])) for row in kept] == [(0, 8), (1, 3), (1, 6)]
    kept = replay.add(kept, 2, batch((1, 1), (1, 9), (1, 2)), 14)
    assert [(row[0], len(row[2])) for row in kept] == [(2, 2), (2, 9)]
    assert replay.add(kept, 3, batch((1, 1)), 0) == []
    assert json.loads(json.dumps(kept)) == kept


def test_a_draw_takes_each_once_and_long_answers_more_often():
    kept = replay.add([], 0, batch((1, 1), (1, 2), (1, 9)), 100)
    rng = np.random.default_rng(0)
    drawn = [replay.draw(kept, 1, rng)[0] for _ in range(1200)]
    shares = [sum(row is one for row in drawn) / 1200 for one in kept]
    np.testing.assert_allclose(shares, [1 / 12, 2 / 12, 9 / 12], atol=0.05)
    assert sorted(map(id, replay.draw(kept, 8, rng))) == sorted(map(id, kept))


def test_updates_are_those_of_the_drafter_alone_on_the_drawn_sequences():
    """The policy reads them anew; rows that are missing teach nothing."""
    config = test_drafter.config(group=1)
    frame, kept = config.frame, replay.add([], 0, batch((2, 3), (1, 4), (4, 2)), 100)
    kept = [[step, [t % 31 for t in p], [t % 31 for t in r]] for step, p, r in kept]
    params, head = test_drafter.weights()
    frozen = drafter.freeze(params)

    def state():
        return drafter.init(config, jax.tree.map(jnp.array, head))

    done = replay.study(config, params, frozen, state(), kept, 2, np.random.default_rng(1))
    expected, rng = state(), np.random.default_rng(1)
    for _ in range(2):
        rows = replay.draw(kept, replay.LESSON, rng)
        whole = replay.lesson(rows, 3, frame.max_prompt + frame.max_response)
        expected, _ = drafter.update(config, frozen, expected, drafter.read(config, params, whole))
    assert done.updates == 2 and np.isfinite(done.loss)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), done.state.params, expected.params
    )
    nothing = replay.study(config, params, frozen, state(), [], 2, rng)
    assert nothing.updates == 0 and np.isnan(nothing.loss)
    jax.tree.map(np.testing.assert_array_equal, nothing.state.params, head)


def test_replay_resumes_bit_for_bit_and_never_touches_the_policy(tmp_path, straight_policy):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    loop.train(test_loop.config(**AGAIN), whole)
    loop.train(test_loop.config(steps=2, **AGAIN), halves)
    loop.train(test_loop.config(**AGAIN), halves)
    assert test_loop.timeless(whole) == test_loop.timeless(halves)
    rows = metrics.read(whole)
    assert [row["drafter/steps"] for row in rows] == [4, 8, 12, 16]
    assert all(row["drafter/replay_updates"] == 3 for row in rows)
    found = test_loop.final_state(test_loop.config(**AGAIN), whole)
    test_loop.assert_same(found.params, straight_policy.params)
    other = jax.tree.leaves(straight_policy.drafter)[0]
    assert not np.array_equal(jax.tree.leaves(found.drafter)[0], other)


@pytest.fixture(scope="module")
def straight_policy(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("once")
    c = test_loop.config(**AGAIN | {"drafter__replay_updates": 0})
    loop.train(c, workdir)
    return test_loop.final_state(c, workdir)


def test_a_warm_up_moves_the_drafter_alone_and_leaves_it_for_the_next_run(tmp_path):
    c = test_loop.config(optim__freeze=True, **AGAIN)
    loop.train(c, tmp_path)
    setup = setup_lib.prepare(c)
    state = test_loop.final_state(c, tmp_path)
    first = setup_lib.first_state(c, setup)
    test_loop.assert_same(state.params, first.params)
    assert base.tree_bytes(state.opt_state) < 100, "moments of a policy that stands still"
    rows = metrics.read(tmp_path)
    assert rows[-1]["drafter/loss"] < rows[0]["drafter/loss"]
    assert all(row["grad_norm"] == row["policy/skipped_total"] == 0 for row in rows)
    _, saved, _ = eagle_file.load(tmp_path, setup.model.config)
    test_loop.assert_same(saved, state.drafter)
    follows = test_loop.config(drafter__init=tmp_path)
    begun = setup_lib.first_state(follows, setup_lib.prepare(follows))
    test_loop.assert_same(begun.drafter, state.drafter)


def test_freezing_all_is_refused():
    with pytest.raises(base.UserError, match=r"optim\.freeze is True, but no drafter is trained"):
        setup_lib.prepare(test_loop.config(optim__freeze=True, drafter__kind="none"))
