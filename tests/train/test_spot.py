"""The spot trainer's parts that need no idle devices; the rest is in tests/sharded.py."""

import math
import threading

import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle
from fastgrpo_jax.train import distill, grpo, optim, replay, spot, step
from tests.rollout import toys


def buffer(count: int) -> replay.Buffer:
    return [[0, [1], [2] * (i + 1)] for i in range(count)]


@pytest.mark.parametrize(("count", "held"), [(0, 0), (7, 0), (8, 1), (40, 5), (500, 8)])
def test_a_part_is_held_back_and_none_is_lost(count, held):
    rows = buffer(count)
    unseen, taught = spot._hold(rows, np.random.default_rng(0))
    assert len(unseen) == held
    assert sorted(map(repr, unseen + taught)) == sorted(map(repr, rows))


def test_rollouts_of_a_step_add_up():
    one = spot.Learned("first", 3, 2.0, 10.0, 4.0, 0.01)
    two = spot.Learned("second", 1, 1.0, 5.0, 2.0, 0.02)
    found = spot.total([one, spot.NOTHING, two])
    assert found == ("second", 4, 1.0, 15.0, 6.0, pytest.approx(0.03))
    assert spot.total([spot.NOTHING])[:2] == (None, 0)
    row = spot.metrics(spot.NOTHING)
    assert row["spot/updates"] == 0 and math.isnan(row["spot/acceptance_gained"])


class Idle:
    """Stands for a mesh of which only the number of devices is asked."""

    size = 4


def trainer() -> spot.Trainer:
    config = step.StepConfig(
        policy=toys.CONFIG,
        eagle=eagle.config_for(toys.CONFIG, "eagle"),
        loss=grpo.LossConfig(),
        optim=optim.OptimConfig(),
        drafter_optim=optim.OptimConfig(),
        distill=distill.DistillConfig(),
        max_response=4,
        max_prompt=4,
    )
    return spot.Trainer(config, Idle())


def given(rows: replay.Buffer) -> spot.Given:
    return spot.Given({}, None, None, rows, np.random.default_rng(0))


def test_nothing_is_begun_without_programs_or_sequences():
    idle = trainer()
    idle.prepare(given(buffer(3)))
    idle.begin()
    found = idle.end()
    assert idle.thread is None and found.state is None and found.idle_seconds > 0
    idle.prepare(given([]))
    assert idle.end().idle_seconds == 0  # never begun: no device was idle
    idle.programs = object()
    idle.begin()
    assert idle.thread is None


def test_what_fails_in_the_thread_is_raised_where_the_rollout_ends(monkeypatch):
    idle = trainer()
    idle.programs = object()

    def fail(*_):
        raise base.UserError("out of memory, say")

    monkeypatch.setattr(spot, "_Student", fail)
    idle.prepare(given(buffer(9)))
    idle.begin()
    with pytest.raises(base.UserError, match="out of memory, say"):
        idle.end()


class Student:
    """Stands for the drafter's copy; an update takes as long as the test says."""

    def __init__(self, *_):
        self.state, self.updates = "new", 0

    def lesson(self, rows):
        return rows

    def examine(self, lesson):
        return float(self.updates)

    def update(self, rows):
        self.updates += 1
        self.updated.set()
        return 1.0


@pytest.fixture
def idle(monkeypatch):
    Student.updated = threading.Event()
    monkeypatch.setattr(spot, "_Student", Student)
    monkeypatch.setattr(spot.sharding, "put_params", lambda mesh, state: state)
    made = trainer()
    made.programs = object()
    return made


def tail(idle: spot.Trainer) -> spot.Learned:
    idle.prepare(given(buffer(9)))
    idle.begin()
    if idle.thread:
        assert Student.updated.wait(60)
    return idle.end()


def test_a_tail_too_short_for_an_update_is_not_tried_until_hope_has_grown(idle):
    found = tail(idle)
    assert found.updates >= 1 and found.state == "new" and found.gained == found.updates
    assert idle.first_s > 0 and idle.tail_s < 60
    idle.first_s, idle.tail_s = 10 * idle.tail_s + 60, 1.0  # as if an update took a minute
    before = idle.first_s
    found = tail(idle)
    assert idle.thread is None and found.updates == 0 and found.idle_seconds > 0
    assert idle.first_s == pytest.approx(spot._HOPE * before)
    idle.tail_s = 1000.0
    assert tail(idle).updates >= 1


def test_a_rollout_that_ended_waits_for_one_program_at_most(idle, monkeypatch):
    """After each of the student's programs it looks whether the rollout has ended."""
    seen = []

    class Ended(Student):
        def lesson(self, rows):
            seen.append("lesson")
            idle.ended.set()
            return rows

        def examine(self, lesson):
            seen.append("examine")
            return 0.0

    monkeypatch.setattr(spot, "_Student", Ended)
    idle.prepare(given(buffer(9)))
    idle.begin()
    idle.thread.join()
    assert seen == ["lesson"] and idle.end().updates == 0
