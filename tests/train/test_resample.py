"""Which groups a step trains on, and the soft overlong penalty: by hand and by loops."""

import numpy as np
import pytest

from fastgrpo_jax.train import overlong, resample

NAN = float("nan")


def test_groups_teach_if_two_scores_differ():
    rewards = np.array([[1, 1, 1], [0, 1, 0], [NAN, 1, 0], [NAN, NAN, 1], [0.1, 0.1, 0.1]])
    expected = [False, True, True, False, False]
    np.testing.assert_array_equal(resample.informative(rewards), expected)


@pytest.mark.parametrize(
    "teaches, expected",
    [
        ("yyy", [0, 1, 2]),
        ("yny nyy", [0, 4, 2]),
        ("nny nyn", [4, 1, 2]),  # one substitute for two: the second stays
        ("nnn nnn nnn", [0, 1, 2]),
        ("nnn nny yny", [5, 6, 8]),
        ("yyy yyy", [0, 1, 2]),
    ],
)
def test_later_groups_take_the_places_of_those_that_teach_nothing(teaches, expected):
    flags = np.array([x == "y" for x in teaches.replace(" ", "")])
    assert resample.choose(flags, 3) == expected


def test_the_penalty_falls_in_a_line_over_the_last_tokens():
    """DAPO's three cases, written out; the last row's limit is below the buffer."""
    lengths = np.array([1, 6, 7, 8, 10, 9, 2])
    limits = np.array([10, 10, 10, 10, 10, 9, 2])
    expected = []
    for length, limit in zip(lengths, limits):
        buffer = min(4, limit)
        if length <= limit - buffer:
            expected.append(0.0)
        else:
            expected.append(((limit - buffer) - length) / buffer)
    np.testing.assert_allclose(overlong.penalty(lengths, limits, 4), expected)
    assert expected[:6] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
