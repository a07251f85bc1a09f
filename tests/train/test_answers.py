"""Rounds of answers are joined and taken apart group by group, all parts of a row together."""

import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.train import answers, data, rewards

G = 2


def one_round(first, groups):
    """Make a round whose every number tells its row."""
    rows = np.arange(first * G, (first + groups) * G)
    prompts = [
        data.Prompt(10 + i, f"p{i}", f"p{i}", (1, i), {}) for i in range(first, first + groups)
    ]
    batch = base.RolloutBatch(
        tokens=rows[:, None] * 100 + np.arange(8),
        logps=-(rows[:, None] + np.zeros(8)),
        masses=np.zeros((len(rows), 8)),
        prompt_length=np.full(len(rows), 2),
        length=3 + rows % 6,
        stopped=rows % 3 != 0,
    )
    scores = rewards.Scores(rows / 4, {"a": rows / 2.0}, failures=first)
    return answers.Answers(prompts, batch, scores, [f"t{i}" for i in rows])


def test_groups_are_taken_whole_from_all_rounds():
    everything = answers.join([one_round(0, 3), one_round(3, 3), one_round(6, 1)])
    whole = one_round(0, 7)
    for ours, theirs in zip(everything.batch, whole.batch):
        np.testing.assert_array_equal(ours, theirs)
    assert everything.texts == whole.texts and everything.prompts == whole.prompts
    assert everything.scores.failures == 0 + 3 + 6
    kept = answers.take(everything, [5, 0, 6])
    rows = [10, 11, 0, 1, 12, 13]
    assert kept.texts == [f"t{i}" for i in rows]
    assert [p.place for p in kept.prompts] == [15, 10, 16]
    np.testing.assert_array_equal(kept.batch.tokens[:, 3], [i * 100 + 3 for i in rows])
    np.testing.assert_array_equal(kept.scores.total, np.array(rows) / 4)
    np.testing.assert_array_equal(kept.scores.parts["a"], np.array(rows) / 2)
    assert kept.scores.failures == 9


@pytest.mark.parametrize("buffer, factor", [(0, 1.0), (3, 1.0), (3, 0.5)])
def test_the_overlong_penalty_is_added_with_its_factor_and_told_without(buffer, factor):
    """A sequence's limit of 8 leaves 6 tokens after the prompt; a row without a score keeps none."""
    plain = one_round(0, 3)
    plain.scores.total[4] = np.nan
    got = answers.punish(plain, 7, 8, buffer, factor)
    if not buffer:
        assert got is plain
        return
    part = [0, 0, 0, -1 / 3, -2 / 3, -1]  # lengths 1 to 6
    np.testing.assert_allclose(got.scores.parts[answers.OVERLONG], part, atol=1e-12)
    np.testing.assert_allclose(got.scores.total, plain.scores.total + factor * np.array(part))
    assert np.isnan(got.scores.total[4])
    np.testing.assert_array_equal(got.scores.parts["a"], plain.scores.parts["a"])
