"""The suites of the rollout engine: what they measure holds on toys."""

import numpy as np
import pytest

from fastgrpo_jax.bench import tail
from fastgrpo_jax.rollout import costs
from tests.bench.test_bench import run


def test_the_engines_blocks_are_set_against_their_bare_forwards(tmp_path):
    result = run(
        tmp_path, "engine", "--quick", "--rows=2", "--strategies=off,learned:2:1:3", "--repeats=1"
    )
    plain, learned = result["rows"]
    assert plain["forwards_ms"] == plain["verify_ms"]
    parts = sum(learned[f"{name}_ms"] for name in ("verify", "first", "level", "feed"))
    assert learned["forwards_ms"] == pytest.approx(parts, abs=0.003)
    for row in (plain, learned):
        assert row["overhead"] == pytest.approx(row["block_ms"] / row["forwards_ms"], rel=0.02)
    assert result["summary"]["max_overhead"] == max(r["overhead"] for r in result["rows"])


def test_acceptances_are_compared_on_the_same_pairs_by_depth_and_width(tmp_path):
    result = run(tmp_path, "acceptance", "--quick", "--widths=1,2", "--drafter=random")
    rows = [r for r in result["rows"] if r["subset"] == "all"]
    assert [(r["depth"], r["width"]) for r in rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for row in rows:
        assert row["pairs"] == 32 and 0 < row["tv"] < 1 and row["entropy"] > 0
        assert 0 <= row["greedy"] <= 1 and 0 <= row["rejection"] <= 1
    assert rows[1]["shared_noise"] >= rows[0]["shared_noise"]


def test_the_tail_forces_lengths_and_draws_who_was_live(tmp_path):
    result = run(
        tmp_path, "tail", "--quick", "--repeats=1", "--methods=plain_nodrop,plain,oracle:2:1:3"
    )
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert {"ratio_vs_plain", "ratio_vs_nodrop"} <= result["summary"].keys()
    assert result["summary"]["simulated_ratio_vs_plain@8"] >= 1.0


def test_forced_lengths_have_the_tail_of_the_real_ones():
    found = tail.lengths(1000, 22539, 0)
    assert found.max() == 22539 and found.min() >= 78
    assert np.median(found) == pytest.approx(792, rel=0.02)
    assert found.mean() == pytest.approx(1527, rel=0.03)
    assert np.quantile(found, 0.99) == pytest.approx(12400, rel=0.03)
    assert sorted(tail.lengths(64, 100, 1)) == sorted(tail.lengths(64, 100, 2))
    assert not np.array_equal(tail.lengths(64, 100, 1), tail.lengths(64, 100, 2))


def test_the_simulation_waits_for_the_slowest_device():
    """With a flat cost every round costs 1, so plain time is the longest response."""
    flat = costs.Table("toy", {1: 1.0, 4096: 1.0}, {}, {})
    found = tail.simulate(flat, 8, 100, 4, 1.0, 0)
    assert found["ratio_vs_plain"] == pytest.approx(9.0)  # chains of 8, all accepted
    assert found["ratio_vs_nodrop"] == pytest.approx(9.0)
    steep = costs.Table("toy", {1: 1.0, 4096: 4096.0}, {}, {})
    assert tail.simulate(steep, 8, 100, 4, 1.0, 0)["ratio_vs_plain"] == pytest.approx(1.0)
