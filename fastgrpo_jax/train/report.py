"""The picture and the table that a run ends with, made from its metrics."""

import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.backends import backend_agg
from matplotlib.figure import Figure

from fastgrpo_jax.train import metrics

PICTURE = "report.png"
_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#2563eb", "#ea580c", "#059669", "#7c3aed", "#94a3b8"
_ENDS = 5  # steps at either end that the summary compares


def write_png(workdir: str | os.PathLike) -> pathlib.Path:
    """Draw reward, response length, acceptance and tokens/s over the steps to report.png.

    What was not recorded is said in its panel.
    """
    workdir = pathlib.Path(workdir)
    rows = metrics.read(workdir)
    steps = np.array([row["step"] for row in rows], np.int64)
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    backend_agg.FigureCanvasAgg(figure)  # no window, no global state
    figure.suptitle(f"{workdir.resolve().name}: {len(rows)} steps", fontsize=13)
    (reward, length), (accept, speed) = figure.subplots(2, 2)
    _panel(reward, "reward", steps, _column(rows, "reward"), _BLUE)
    _length_panel(length, steps, rows)
    _panel(
        accept,
        "tokens per round (accept length)",
        steps,
        _column(rows, "spec/accept_length"),
        _GREEN,
    )
    if accept.lines:
        accept.axhline(1.0, color=_GREY, linewidth=1, linestyle=":", label="plain decoding")
        accept.legend(frameon=False, fontsize=8)
    _panel(speed, "rollout tokens/s", steps, np.array(metrics.tokens_per_s(rows)), _PURPLE)
    if speed.lines:
        speed.set_ylim(bottom=0)
    path = workdir / PICTURE
    figure.savefig(path)
    return path


def final_summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Make a table of the first five steps against the last five (halves of a shorter run)."""
    if not rows:
        return "no steps recorded"
    columns = {
        "reward": (_column(rows, "reward"), ".3f"),
        "response length": (_column(rows, "completions/mean_length"), ".1f"),
        "clipped ratio": (_column(rows, "completions/clipped_ratio"), ".1%"),
        "accept length": (_column(rows, "spec/accept_length"), ".2f"),
        "rollout tokens/s": (np.array(metrics.tokens_per_s(rows)), ".0f"),
        "step time, s": (_column(rows, "step_time"), ".2f"),
    }
    rollout, train, other = _time_shares(rows)
    columns["time in rollout"] = (rollout, ".0%")
    columns["time in training"] = (train, ".0%")
    columns["time elsewhere"] = (other, ".0%")
    ends = max(1, min(_ENDS, len(rows) // 2))  # never the same steps at both ends
    lines = [f"{f'{len(rows)} steps':<18}{f'first {ends}':>12}{f'last {ends}':>12}{'change':>12}"]
    for name, (values, form) in columns.items():
        first, last = _mean(values[:ends]), _mean(values[-ends:])
        change = last - first if len(rows) > 1 else math.nan
        cells = (_cell(first, form), _cell(last, form), _cell(change, "+" + form))
        lines.append(f"{name:<18}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Average exponentially over about a tenth of the run (at least 5 steps), skipping NaN.

    Each mean is over its own past with weights that add up to 1, so that the first value is
    unbiased: s_t = sum_i a^(t-i) v_i / sum_i a^(t-i), a = 1 - 2 / (span + 1).
    """
    decay = 1 - 2 / (max(5.0, len(values) / 10) + 1)
    total = weight = 0.0
    means = []
    for value in values:
        known = not math.isnan(value)
        total = decay * total + (value if known else 0.0)
        weight = decay * weight + known
        means.append(total / weight if weight else math.nan)
    return np.array(means, np.float64)


def _panel(axes: Any, title: str, steps: np.ndarray, values: np.ndarray, color: str) -> None:
    """Draw a series, faint, and its smoothed line over it."""
    _dress(axes, title)
    if np.all(np.isnan(values)):
        _not_recorded(axes)
        return
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1, marker="o", markersize=2.5)
    axes.plot(steps, smoothed(values), color=color, linewidth=2, marker=_dot(steps))


def _length_panel(axes: Any, steps: np.ndarray, rows: Sequence[Mapping[str, Any]]) -> None:
    _panel(
        axes, "response length, tokens", steps, _column(rows, "completions/mean_length"), _ORANGE
    )
    if not axes.lines:
        return
    axes.lines[-1].set_label("all, smoothed")
    ended = _column(rows, "completions/mean_terminated_length")
    if not np.all(np.isnan(ended)):
        axes.plot(
            steps, smoothed(ended), color=_BLUE, linewidth=1.5, linestyle="--", marker=_dot(steps)
        )
        axes.lines[-1].set_label("ended by a stop token")
    clipped = _column(rows, "completions/clipped_ratio")
    if not np.all(np.isnan(clipped)):
        share = axes.twinx()
        share.fill_between(steps, 0, clipped, color=_GREY, alpha=0.25, linewidth=0)
        share.plot(steps, clipped, color=_GREY, linewidth=1, marker=_dot(steps))
        share.set_ylim(0, 1)
        share.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
        share.set_ylabel("clipped at the limit", color="#64748b", fontsize=9)
        share.spines["top"].set_visible(False)
        share.tick_params(labelsize=8, colors="#64748b")
        axes.set_zorder(share.get_zorder() + 1)  # the lines lie over the shade
        axes.patch.set_visible(False)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("step", fontsize=9)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _not_recorded(axes: Any) -> None:
    axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=_GREY)
    axes.set_xticks([])
    axes.set_yticks([])


def _dot(steps: np.ndarray) -> str:
    return "o" if len(steps) == 1 else ""  # a line of one point shows nothing


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Collect a key over the steps; NaN where it is absent or null."""
    values = [row.get(key) for row in rows]
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _time_shares(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the shares of each step's time in rollout, training and the rest."""
    whole = _column(rows, "step_time")
    rollout = _column(rows, "timing_s/rollout") / whole
    train = _column(rows, "timing_s/train") / whole
    return rollout, train, 1.0 - rollout - train


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.mean(known)) if len(known) else math.nan


def _cell(value: float, form: str) -> str:
    if math.isnan(value):
        return "-"
    text = f"{value:{form}}"
    return text if len(text) < 12 else f"{value:.3g}"
