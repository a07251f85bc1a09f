"""Who sits where, and that no order of admission changes a token."""

import collections

import numpy as np
import pytest

from fastgrpo_jax.rollout import bandit, generate, schedule, strategy
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.rollout import pool as pool_lib
from tests.rollout import toys


def seated(seats: schedule.Seats, total: int) -> list[int]:
    return [int(x) for x in seats.lines if x < total]


def test_prompts_expected_to_be_long_come_first_and_groups_stay_together():
    assert schedule.order(2, 3, None) == (0, 1, 2, 3, 4, 5)
    assert schedule.order(2, 3, (5.0, 9.0, 7.0)) == (2, 3, 4, 5, 0, 1)
    assert schedule.order(1, 3, (5.0, 5.0, 7.0)) == (2, 0, 1)  # equal ones in their own order


def test_seats_are_filled_refilled_and_given_up():
    """Eight rows for at most four seats in a ladder of 1, 2 and 4, by hand."""
    ladder, done = (1, 2, 4), np.zeros(8, bool)
    move = schedule.seat(schedule.begin(tuple(range(8)), 4), done, ladder)
    assert seated(move.seats, 8) == [0, 1, 2, 3] and move.seats.waiting == (4, 5, 6, 7)
    assert move.admitted == 4 and move.keep.tolist() == [4] * 4  # none of the old slots
    assert schedule.leave_at(move.seats, ladder, False) == 3
    done[[1, 3]] = True
    move = schedule.seat(move.seats, done, ladder)
    assert seated(move.seats, 8) == [0, 2, 4, 5] and move.seats.waiting == (6, 7)
    assert move.keep.tolist() == [0, 2, 4, 4] and move.fresh.tolist() == [8, 8, 4, 5]
    still = schedule.seat(move.seats, done, ladder)
    assert still.admitted == 0 and still.keep.tolist() == [0, 1, 2, 3] and still.seats == move.seats
    done[[0, 2, 4]] = True
    move = schedule.seat(move.seats, done, ladder)
    assert seated(move.seats, 8) == [5, 6, 7] and len(move.seats.lines) == 4
    assert move.seats.waiting == () and schedule.leave_at(move.seats, ladder, False) == 2
    done[6] = True
    move = schedule.seat(move.seats, done, ladder)
    assert seated(move.seats, 8) == [5, 7] and len(move.seats.lines) == 2
    assert schedule.leave_at(move.seats, ladder, False) == 1
    assert schedule.alive(move.seats, done).tolist() == [0, 1]


def test_the_last_rows_shrink_the_bucket_as_they_are_admitted():
    ladder, done = (1, 2, 4), np.zeros(5, bool)
    move = schedule.seat(schedule.begin(tuple(range(5)), 4), done, ladder)
    done[:4] = True
    move = schedule.seat(move.seats, done, ladder)
    assert seated(move.seats, 5) == [4] and len(move.seats.lines) == 1 and move.admitted == 1


def test_a_large_bucket_is_refilled_an_eighth_at_a_time():
    ladder, done = (16, 64), np.zeros(200, bool)
    move = schedule.seat(schedule.begin(tuple(range(200)), 64), done, ladder)
    assert schedule.leave_at(move.seats, ladder, False) == 56
    done[:7] = True
    still = schedule.seat(move.seats, done, (16, 60, 64))
    assert still.admitted == 0 and len(still.seats.lines) == 64  # no smaller while rows wait
    done[7] = True
    assert schedule.seat(move.seats, done, ladder).admitted == 8


def test_kept_rows_leave_together():
    """The papers' baseline: no row gives up its seat before all are done."""
    ladder, done = (1, 2, 4), np.zeros(6, bool)
    move = schedule.seat(schedule.begin(tuple(range(6)), 4), done, ladder, True)
    assert schedule.leave_at(move.seats, ladder, True) == 0
    done[:3] = True
    assert schedule.seat(move.seats, done, ladder, True).admitted == 0
    done[3] = True
    move = schedule.seat(move.seats, done, ladder, True)
    assert seated(move.seats, 6) == [4, 5] and len(move.seats.lines) == 4
    assert schedule.leave_at(move.seats, ladder, True) == 0


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_seated_once_and_served_to_its_end(seed):
    """No row starves, none is lost, whatever finishes when."""
    rng = np.random.default_rng(seed)
    total = int(rng.integers(5, 60))
    ladder = tuple(sorted({1, *rng.integers(1, total + 1, 3).tolist()}))
    left, done = rng.integers(1, 30, total), np.zeros(total, bool)
    lines = tuple(rng.permutation(total).tolist())
    seats, admissions = schedule.begin(lines, ladder[-1]), collections.Counter()
    for _ in range(5000):
        move = schedule.seat(seats, done, ladder)
        admissions.update(move.fresh[move.fresh < total].tolist())
        seats = move.seats
        going = seats.lines[schedule.alive(seats, done)]
        assert len(set(going.tolist())) == len(going) > 0
        leave = schedule.leave_at(seats, ladder, False)
        while len(going) > leave and not done.all():
            left[going] -= 1
            done |= left <= 0
            going = seats.lines[schedule.alive(seats, done)]
        if done.all():
            break
    assert done.all() and set(admissions.values()) == {1} and len(admissions) == total


def waiting_engine(capacity: int, rounds: int = 3, keep: bool = False) -> engine_lib.Engine:
    ladder = tuple(sorted({1, min(2, capacity), capacity}))
    engine = engine_lib.make_engine(
        toys.SPEC,
        rows=ladder,
        total=toys.ROWS,
        limits=toys.LIMITS,
        stop_tokens=(toys.STOP,),
        slot_step=24,
        rounds=rounds,
        span=toys.DEEPEST_SPAN,
    )
    engine.keep_finished, engine.pool = keep, POOL
    return engine


POOL = pool_lib.Pool()


@pytest.mark.parametrize("expected", [None, (1.0, 3.0, 2.0), (3.0, 1.0, 2.0)], ids=str)
@pytest.mark.parametrize("capacity", [1, 4, 7])
def test_admission_changes_no_token(capacity, expected):
    """Law 1: nine rows through fewer seats, in any order, while the strategy changes."""
    texts = ("learned:3:3:8", "off", "ngram:3:1:4", "oracle:3:1:4")
    controller = strategy.cycle(tuple(map(strategy.parse, texts)))
    engine = waiting_engine(capacity)
    engine.pool.expected |= frozenset(engine_lib.programs(engine, controller))
    request = toys.REQUEST._replace(expected=expected)
    run = toys.rollout(engine, toys.told(toys.plain(), 0.7), controller, request=request)
    toys.assert_same(run.batch, toys.plain().batch)
    assert max(b.live for b in run.blocks) == capacity
    assert engine.pool.unexpected == 0


def test_an_admitted_row_drafts_as_well_as_one_that_sat_from_the_start():
    """Its drafter's memory comes along: round by round the same drafts are accepted."""
    controller = toys.fixed("learned:3:1:4")
    waited = toys.rollout(waiting_engine(4), toys.weights(), controller)
    straight = toys.rollout(toys.engine(), toys.weights(), controller)
    for field in ("row_rounds", "emitted", "accepted", "tried"):
        sums = [sum(getattr(b.report, field) for b in run.blocks) for run in (waited, straight)]
        np.testing.assert_array_equal(*sums)


def test_kept_rows_are_decoded_batch_by_batch():
    run = toys.rollout(waiting_engine(4, keep=True), toys.weights(), toys.fixed("off"))
    toys.assert_same(run.batch, toys.plain().batch)
    assert {b.rows for b in run.blocks} == {4}


def test_each_row_may_have_its_own_cap():
    caps = (1, 2, 3, 4, 5, 6, 7, 8, 50)
    request = toys.REQUEST._replace(caps=caps)
    run = toys.rollout(
        toys.engine(stop=toys.NEVER), toys.weights(), toys.fixed("learned:3:1:4"), request=request
    )
    said = run.batch.length - run.batch.prompt_length
    wanted = np.minimum(caps, np.minimum(22, 32 - run.batch.prompt_length))
    assert said.tolist() == wanted.tolist()


def test_two_hundred_blocks_of_changing_concurrency_compile_nothing_unlisted():
    """Law 5: waiting rows, shrinking buckets, growing slots and an adaptive controller."""
    arms = tuple(map(strategy.parse, ("learned:3:3:8", "learned:2:1:3", "ngram:3:1:4")))
    controller = bandit.controller(lambda rows: arms, epsilon=0.5)
    engine = waiting_engine(4, rounds=2)
    engine.pool = pool_lib.Pool(frozenset(engine_lib.programs(engine, controller)))
    weights, memory, blocks, step = toys.told(toys.plain()), {}, [], 0
    while len(blocks) < 200:
        request = toys.REQUEST._replace(step=step)
        run = generate.rollout(
            engine, weights, request, toys.SAMPLED, toys.LIMITS, controller, memory=memory
        )
        memory, step = controller.renew(run.memory), step + 1
        blocks += run.blocks
    assert len({(b.rows, b.slots) for b in blocks}) > 3
    assert len({b.strategy for b in blocks}) > 2
    assert engine.pool.unexpected == 0
    assert engine.pool.compiled <= len(engine.pool.expected)
    one = max(map(pool_lib.held_bytes, engine.pool.programs.values()))
    assert 0 < engine.pool.bytes <= one * len(engine.pool.expected)
