"""Laws of the report: it is drawn from whatever was recorded, and its table is exact."""

import json

import numpy as np
import pytest

from fastgrpo_jax.train import report

NAN = np.nan


def rows_of(count):
    return [
        {
            "step": i,
            "reward": i / 10,
            "completions/mean_length": 20.0 - i,
            "completions/mean_terminated_length": 15.0 - i if i % 2 else None,
            "completions/clipped_ratio": 0.25,
            "spec/accept_length": 1.0 + i / 10,
            "num_tokens": 100 * (i + 1),
            "timing_s/rollout": 2.0,
            "timing_s/train": 1.0,
            "step_time": 4.0,
        }
        for i in range(count)
    ]


def save(tmp_path, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines)


@pytest.mark.parametrize(
    "rows", [rows_of(12), rows_of(1), [{"step": 0}, {"step": 1, "reward": None}], []]
)
def test_a_picture_comes_of_whatever_was_recorded(tmp_path, rows):
    save(tmp_path, rows)
    path = report.write_png(tmp_path)
    assert path == tmp_path / "report.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 10_000


def test_panels_say_what_was_not_recorded(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(report, "_not_recorded", lambda axes: said.append(axes.get_title("left")))
    save(tmp_path, [{"step": 0, "reward": 1.0}])
    report.write_png(tmp_path)
    assert said == [
        "response length, tokens",
        "tokens per round (accept length)",
        "rollout tokens/s",
    ]


def test_the_table_compares_the_ends():
    words = [line.rsplit(maxsplit=3) for line in report.final_summary(rows_of(12)).splitlines()]
    table = {row[0]: row[1:] for row in words[1:]}
    assert table["reward"] == ["0.200", "0.900", "+0.700"]  # means of 0 to .4 and of .7 to 1.1
    assert table["response length"] == ["18.0", "11.0", "-7.0"]
    assert table["clipped ratio"] == ["25.0%", "25.0%", "+0.0%"]
    assert table["accept length"] == ["1.20", "1.90", "+0.70"]
    assert table["rollout tokens/s"] == ["50", "50", "+0"]
    assert table["time in rollout"] == ["50%", "50%", "+0%"]
    assert table["time in training"] == ["25%", "25%", "+0%"]
    assert table["time elsewhere"] == ["25%", "25%", "+0%"]
    assert words[0][0].startswith("12 steps")


def test_the_table_tolerates_short_and_bare_runs():
    assert report.final_summary([]) == "no steps recorded"
    table = report.final_summary([{"step": 0, "reward": 0.5}]).splitlines()
    assert table[0].split() == ["1", "steps", "first", "1", "last", "1", "change"]
    assert table[1].split() == ["reward", "0.500", "0.500", "-"]
    assert table[2].split()[-3:] == ["-", "-", "-"]


def test_the_table_of_a_short_run_compares_its_halves():
    table = report.final_summary(rows_of(5)).splitlines()
    assert table[0].split() == ["5", "steps", "first", "2", "last", "2", "change"]
    assert table[1].split() == ["reward", "0.050", "0.350", "+0.300"]


def test_smoothing_starts_unbiased_and_skips_gaps():
    decay = 1 - 2 / 6  # a span of 5
    got = report.smoothed(np.array([NAN, 3.0, NAN, 6.0]))
    last = (3.0 * decay**2 + 6.0) / (decay**2 + 1)
    np.testing.assert_allclose(got, [NAN, 3.0, 3.0, last], rtol=1e-15)
    np.testing.assert_allclose(report.smoothed(np.full(80, 0.5)), np.full(80, 0.5), rtol=1e-12)
