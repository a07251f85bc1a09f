"""Laws of metrics: exact values on small tables, files that survive a kill and a resume."""

import io
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.train import metrics

NAN = np.nan


def summarise(totals, parts=None, group=2, lengths=None, stopped=None):
    totals = np.array(totals, np.float64)
    lengths = np.full(len(totals), 3, np.int32) if lengths is None else np.array(lengths, np.int32)
    stopped = np.ones(len(totals), bool) if stopped is None else np.array(stopped)
    parts = {name: np.array(values, np.float64) for name, values in (parts or {}).items()}
    return metrics.summarise(totals, parts, group, lengths, stopped, 77)


def steps(workdir):
    return [row["step"] for row in metrics.read(workdir)]


# ---- summarise ----


def test_rewards_are_summed_up_by_groups():
    """B1"""
    m = summarise([1, 3, 5, 5, 0, 4], {"a": [0, 0, 0, 0, 0, 6]})
    assert m["reward"] == 3.0
    np.testing.assert_allclose(m["reward_std"], (np.sqrt(2) + 0 + np.sqrt(8)) / 3, rtol=1e-15)
    assert m["frac_reward_zero_std"] == 1 / 3
    assert m["rewards/a/mean"] == 1.0
    np.testing.assert_allclose(m["rewards/a/std"], np.sqrt(6), rtol=1e-15)
    assert m["num_tokens"] == 77


def test_rows_that_cannot_be_scored_are_left_out():
    """B9"""
    m = summarise([1, NAN, 0, NAN, NAN, NAN, NAN, NAN], {"a": [NAN] * 8, "b": [1] * 8}, group=4)
    assert m["reward"] == 0.5 and m["frac_reward_zero_std"] == 0.5
    np.testing.assert_allclose(m["reward_std"], np.sqrt(0.5) / 2, rtol=1e-15)
    assert np.isnan(m["rewards/a/mean"]) and m["rewards/b/mean"] == 1.0
    assert np.isnan(summarise([NAN, NAN])["reward"])


def test_equal_rewards_have_exactly_no_deviation():
    """B5"""
    m = summarise([0.1] * 6, group=6)  # the mean of six 0.1 is not 0.1 in float64
    assert (m["reward_std"], m["frac_reward_zero_std"]) == (0.0, 1.0)


def test_one_scored_row_of_a_group_has_no_deviation():
    """B4"""
    m = summarise([1, NAN, 0, 1])
    np.testing.assert_allclose(m["reward_std"], np.sqrt(0.5) / 2, rtol=1e-15)
    assert m["frac_reward_zero_std"] == 0.5


def test_lengths_are_of_all_and_of_terminated_rows():
    m = summarise([0] * 4, lengths=[2, 8, 5, 8], stopped=[True, False, True, False])
    got = [m[f"completions/{k}"] for k in ("mean_length", "min_length", "max_length")]
    assert got == [5.75, 2.0, 8.0]
    ended = [m[f"completions/{k}_terminated_length"] for k in ("mean", "min", "max")]
    assert ended == [3.5, 2.0, 5.0]
    assert m["completions/clipped_ratio"] == 0.5


def test_without_terminated_rows_their_lengths_are_unknown():
    m = summarise([0, 0], stopped=[False, False])
    assert np.isnan(m["completions/mean_terminated_length"])
    assert m["completions/clipped_ratio"] == 1.0


def test_token_rates_are_recorded_or_come_from_the_counter():
    rows = [
        {"step": 0, "num_tokens": 100, "timing_s/rollout": 2.0},
        {"step": 1, "num_tokens": 160, "timing_s/rollout": 3.0},
        {"step": 2, "num_tokens": 200},
        {"step": 3, "num_tokens": 300, "timing_s/rollout": 4.0, "rollout/tokens_per_s": 7.0},
        {"step": 4, "timing_s/rollout": 1.0},
    ]
    np.testing.assert_array_equal(metrics.tokens_per_s(rows), [50.0, 20.0, NAN, 7.0, NAN])
    later = [{"step": 9, "num_tokens": 100, "timing_s/rollout": 2.0}]
    np.testing.assert_array_equal(metrics.tokens_per_s(later), [NAN])


# ---- files ----


def test_lines_are_plain_json_with_their_step(tmp_path):
    writer = metrics.open_writer(tmp_path / "new", 0, False)
    row = {"a": np.float32(0.5), "b": jnp.int32(3), "c": NAN, "d": np.inf, "e": 1}
    text = {
        "prompt": [{"role": "user", "content": "é"}],
        "text": "a\ud800\n",
        "answer": np.int64(4),
    }
    metrics.write(writer, 0, row, [text, {"reward": NAN}])
    lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()  # flushed already
    assert lines == ['{"step": 0, "a": 0.5, "b": 3, "c": null, "d": null, "e": 1}']
    saved = (tmp_path / "new" / "completions.jsonl").read_text().splitlines()
    assert json.loads(saved[0]) == {"step": 0, **text} and json.loads(saved[1])["reward"] is None
    metrics.close(writer)
    assert metrics.read(tmp_path / "new")[0]["a"] == 0.5
    assert metrics.read(tmp_path / "nothing") == []


def test_a_resumed_run_has_no_gaps_and_no_repeats(tmp_path):
    """F1"""
    writer = metrics.open_writer(tmp_path, 0, False)
    for step in range(5):
        metrics.write(writer, step, {"x": step}, [{"text": "t"}] * 2)
    metrics.close(writer)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    writer = metrics.open_writer(tmp_path, 3, False)
    metrics.write(writer, 3, {"x": 30}, [{"text": "t"}])
    metrics.close(writer)
    assert steps(tmp_path) == [0, 1, 2, 3] and metrics.read(tmp_path)[3]["x"] == 30
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines()[:3] == before[:3]
    kept = [json.loads(line)["step"] for line in (tmp_path / "completions.jsonl").open()]
    assert kept == [0, 0, 1, 1, 2, 2, 3]
    metrics.close(metrics.open_writer(tmp_path, 0, False))
    assert steps(tmp_path) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["completions.jsonl", "metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 2, "x"', b'{"step": 2, "x": "\xc3', b"{}", b"\0\0"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    """F7"""
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": 1}\n' + torn)
    assert steps(tmp_path) == [0, 1]
    writer = metrics.open_writer(tmp_path, 2, False)
    metrics.write(writer, 2, {})
    metrics.close(writer)
    assert steps(tmp_path) == [0, 1, 2]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": 1}')
    writer = metrics.open_writer(tmp_path, 2, False)
    metrics.write(writer, 2, {})
    metrics.close(writer)
    assert steps(tmp_path) == [0, 1, 2]


def test_a_broken_line_within_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"ste\n{"step": 2}\n')
    with pytest.raises(base.UserError, match=r"metrics.jsonl, line 2"):
        metrics.read(tmp_path)


def test_tensorboard_gets_the_finite_numbers(tmp_path):
    writer = metrics.open_writer(tmp_path, 0, True)
    metrics.write(writer, 0, {"reward": 0.5, "none": NAN})
    metrics.close(writer)
    (events,) = (tmp_path / "tb").iterdir()
    assert b"reward" in events.read_bytes() and b"none" not in events.read_bytes()


def test_tensorboard_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(base.UserError, match=r"log.tensorboard.*fastgrpo-jax\[log\]"):
        metrics.open_writer(tmp_path, 0, True)


# ---- progress ----


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_output_has_a_line_now_and_then_and_the_last():
    out = io.StringIO()
    progress = metrics.Progress(4, 0, out, interval_s=3600.0)
    progress.phase("rollout")
    for step in range(4):
        progress.step(step, {"reward": 0.25 * step, "spec/accept_length": 1.5, "loss": None})
    progress.close()
    assert out.getvalue().splitlines() == [
        "step 1/4  reward 0.000  accept 1.50",
        "step 4/4  reward 0.750  accept 1.50",
    ]


def test_plain_output_ends_with_the_last_step_that_was_done():
    out = io.StringIO()
    progress = metrics.Progress(9, 0, out, interval_s=3600.0)
    for step in range(3):
        progress.step(step, {"reward": 0.25 * step})
    progress.note("warning: so it is")
    progress.close()
    assert out.getvalue().splitlines() == [
        "step 1/9  reward 0.000",
        "warning: so it is",
        "step 3/9  reward 0.500",
    ]


def test_a_terminal_has_a_bar_that_starts_at_the_resumed_step():
    out = Terminal()
    progress = metrics.Progress(4, 2, out)
    progress.phase("rollout")
    progress.step(2, {"reward": 0.5, "rollout/tokens_per_s": 120.4})
    progress.step(3, {"reward": 0.75})
    progress.note("a note of its own line")
    progress.close()
    assert "a note of its own line\n" in out.getvalue()
    last = out.getvalue().split("\r")[-1]
    assert "rollout" in last and "4/4" in last and "reward 0.750" in last
