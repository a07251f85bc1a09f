"""Measuring costs: with a clock that is told what to say."""

import jax.numpy as jnp
import pytest

from fastgrpo_jax.models import eagle
from fastgrpo_jax.rollout import calibrate, costs, decode, speculate
from tests.rollout import toys


def weights():
    return speculate.Weights(toys.policy_params(), toys.drafter_params(toys.SPEC.eagle), None, None)


def test_the_curves_hold_the_shortest_run_of_each_size():
    """Every look at the clock is a second later, but for the runs that are told to be slow."""
    ticks = iter(range(10_000))
    table = calibrate.measure(
        toys.CONFIG, toys.SPEC.eagle, weights(), budget_s=1e9, sizes=(1, 4, 2), repeats=2,
        clock=lambda: float(next(ticks)),
    )  # fmt: skip
    assert table.forward == {1: 1.0, 2: 1.0, 4: 1.0} == table.draft
    assert table.rows == {1: 1.0}  # of the sizes, those that are measured as rows too
    assert table.device == calibrate.device() and "cores" in table.device
    bare = calibrate.measure(
        toys.CONFIG,
        None,
        weights(),
        budget_s=1e9,
        sizes=(1, 2, 4),
        clock=lambda: float(next(ticks)),
    )
    assert bare.draft == {}


def test_the_budget_ends_the_measuring_but_leaves_three_points():
    ticks = iter(range(10_000))
    table = calibrate.measure(
        toys.CONFIG, None, weights(), budget_s=0.0, sizes=(1, 4, 2, 8), repeats=1,
        clock=lambda: float(next(ticks)),
    )  # fmt: skip
    assert list(table.forward) == [1, 2, 4]


def test_fewer_tokens_never_cost_more():
    """A neighbour's load during one size must not make it dearer than a larger one."""
    assert calibrate.smooth({1: 2.0, 2: 5.0, 4: 3.0, 8: 9.0}) == {1: 2.0, 2: 3.0, 4: 3.0, 8: 9.0}


def test_a_table_is_measured_once_for_each_kind_of_model(tmp_path):
    made = []

    def make():
        made.append(1)
        return costs.Table("toy", {1: 1.0}, {}, {})

    for about in ("a", "a", "b"):
        assert calibrate.cached(str(tmp_path), about, make).forward == {1: 1.0}
    assert len(made) == 2
    calibrate.cached("", "a", make)
    assert len(made) == 3 and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("with_head", (True, False))
def test_a_bare_draft_step_runs_the_drafter_on_all_its_nodes(with_head):
    head = toys.SPEC.eagle
    cache = eagle.new_cache(head, 2, 8)
    out, _ = decode.draft_step(
        head, speculate.learned(weights()), jnp.zeros((2, 3, head.hidden)), cache, with_head
    )
    assert out.shape == ((2, 3) if with_head else (2, 3, head.hidden))
