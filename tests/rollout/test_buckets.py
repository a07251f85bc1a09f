import itertools

import pytest

from fastgrpo_jax import base
from fastgrpo_jax.rollout import buckets


def test_rows_fall_through_powers_of_two_to_one():
    assert buckets.row_ladder(1) == (1,)
    assert buckets.row_ladder(2) == (1, 2)
    assert buckets.row_ladder(8) == (1, 2, 4, 8)
    assert buckets.row_ladder(9) == (1, 2, 4, 8, 9)
    assert buckets.row_ladder(32) == (1, 2, 4, 8, 16, 32)


def test_asked_rows_are_sorted_and_always_hold_the_whole_rollout():
    assert buckets.row_ladder(32, "4,8,16,24") == (4, 8, 16, 24, 32)
    assert buckets.row_ladder(32, "16, 4,16") == (4, 16, 32)
    assert buckets.row_ladder(8, "8,16,4") == (4, 8)
    assert buckets.row_ladder(8, "100") == (8,)


def test_rows_are_rounded_up_to_what_devices_can_cut():
    assert buckets.row_ladder(9, "", 4) == (4, 8, 12)
    assert buckets.row_ladder(9, "1,5,8", 8) == (8, 16)
    assert buckets.row_ladder(3, "", 8) == (8,)
    assert buckets.row_ladder(32, "4,24", 8) == (8, 24, 32)


@pytest.mark.parametrize("asked", ["0", "-4", "4,0", "a", "4;8", "4,", ",", "1.5"])
def test_rows_that_are_no_counts_are_refused_by_name(asked):
    with pytest.raises(base.UserError, match=r"rollout\.row_buckets is") as error:
        buckets.row_ladder(8, asked)
    assert repr(asked) in str(error.value)


def test_slots_grow_by_half_in_multiples_of_the_step():
    assert buckets.slot_ladder(1, 128) == (128,)
    assert buckets.slot_ladder(128, 128) == (128,)
    assert buckets.slot_ladder(129, 128) == (128, 256)
    assert buckets.slot_ladder(1000, 128) == (128, 256, 384, 512, 768, 1152)
    assert buckets.slot_ladder(69, 68) == (68, 136)
    for step in (1, 7, 64):
        for longest in range(1, 300):
            ladder = buckets.slot_ladder(longest, step)
            assert ladder[-1] >= longest and (len(ladder) == 1 or ladder[-2] < longest)
            assert all(x % step == 0 for x in ladder)
            assert all(a < b <= 2 * a for a, b in itertools.pairwise(ladder))
    assert len(buckets.slot_ladder(100_000, 128)) < 20


def test_a_size_finds_its_step_and_the_one_below():
    ladder = (1, 2, 4, 9)
    assert [buckets.at_least(ladder, n) for n in (0, 1, 2, 3, 4, 5, 9)] == [1, 1, 2, 4, 4, 9, 9]
    assert [buckets.below(ladder, n) for n in (1, 2, 3, 4, 9, 10)] == [0, 1, 2, 2, 4, 9]
    with pytest.raises(ValueError, match="10 is above"):
        buckets.at_least(ladder, 10)
