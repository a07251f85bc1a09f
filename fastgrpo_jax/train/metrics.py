"""Metrics of a rollout under TRL's names, and the files of a workdir that hold them.

Files are JSON lines with a `step` each. A resumed run first drops the lines of the steps it
will run again, so that there are neither gaps nor repeats, whenever the last one was killed.
"""

import io
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tqdm
from jaxtyping import Bool, Float, Int

from fastgrpo_jax import base, hosts

METRICS, COMPLETIONS, TENSORBOARD = "metrics.jsonl", "completions.jsonl", "tb"


def summarise(
    totals: Float[np.ndarray, " N"],
    parts: Mapping[str, Float[np.ndarray, " N"]],
    group: int,
    lengths: Int[np.ndarray, " N"],
    stopped: Bool[np.ndarray, " N"],
    num_tokens: int,
) -> dict[str, float]:
    """Compute the metrics of a rollout from its rows, which are in groups of `group`.

    NaN rewards (not applicable) are left out of every mean. Deviations have N - 1 in the
    denominator; a group with fewer than two scored rows has deviation 0, since it teaches
    nothing either. `reward_std` is the mean of the groups' deviations. Lengths are in response
    tokens, the stop token included; `terminated` ones are of rows that ended by a stop token.

    Args:
      totals: weighted rewards. parts: each function's own.
      lengths, stopped: of the responses.
      num_tokens: tokens of the whole run so far, prompts included.
    """
    deviations = [_deviation(rewards) for rewards in totals.reshape(-1, group)]
    metrics = {
        "reward": _mean(totals),
        "reward_std": float(np.mean(deviations)),
        "frac_reward_zero_std": float(np.mean([d == 0.0 for d in deviations])),
    }
    for name, values in parts.items():
        metrics[f"rewards/{name}/mean"] = _mean(values)
        metrics[f"rewards/{name}/std"] = _deviation(values)
    for prefix, kept in (("", lengths), ("terminated_", lengths[stopped])):
        for name, of in (("mean", np.mean), ("min", np.min), ("max", np.max)):
            metrics[f"completions/{name}_{prefix}length"] = (
                float(of(kept)) if len(kept) else math.nan
            )
    metrics["completions/clipped_ratio"] = float(np.mean(~stopped))
    metrics["num_tokens"] = num_tokens
    return metrics


def tokens_per_s(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Compute the rollout's tokens per second of each step, NaN where it is not recorded.

    It is `rollout/tokens_per_s`, or else the growth of `num_tokens` (prompts included) over
    `timing_s/rollout`.
    """
    rates = []
    for i, row in enumerate(rows):
        rate = row.get("rollout/tokens_per_s")
        seconds = row.get("timing_s/rollout")
        if rate is None and seconds and row.get("num_tokens") is not None:
            before = rows[i - 1].get("num_tokens") if i else (0 if row["step"] == 0 else None)
            rate = None if before is None else (row["num_tokens"] - before) / seconds
        rates.append(math.nan if rate is None else float(rate))
    return rates


class Writer(NamedTuple):
    """Open files of a run; `board` is a TensorBoard writer or None."""

    metrics: io.TextIOBase
    completions: io.TextIOBase
    board: Any


def open_writer(workdir: str | os.PathLike, first_step: int, tensorboard: bool) -> Writer:
    """Open a workdir's files to go on at `first_step`; lines of it and later are dropped. Of
    several processes the first one writes.

    Raises:
      base.UserError: `tensorboard` without tensorboardX, or a broken line (a torn last line, as
        a killed run leaves it, is dropped).
    """
    if not hosts.first():
        return Writer(open(os.devnull, "w"), open(os.devnull, "w"), None)
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    board = _open_board(workdir, first_step) if tensorboard else None
    for name in (METRICS, COMPLETIONS):
        _drop(workdir / name, first_step)
    return Writer(_append(workdir / METRICS), _append(workdir / COMPLETIONS), board)


def write(
    writer: Writer,
    step: int,
    metrics: Mapping[str, Any],
    completions: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Append a step's metrics and completions and flush; non-finite numbers become null."""
    writer.metrics.write(_line({"step": step, **metrics}))
    for row in completions:
        writer.completions.write(_line({"step": step, **row}))
    writer.metrics.flush()
    writer.completions.flush()
    if writer.board is not None:
        for name, value in metrics.items():
            if math.isfinite(value):
                writer.board.add_scalar(name, value, step)
        writer.board.flush()


def close(writer: Writer) -> None:
    """Close the files of a run."""
    writer.metrics.close()
    writer.completions.close()
    if writer.board is not None:
        writer.board.close()


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Read the metrics of a workdir in order; empty without any. A torn last line is left out.

    Raises:
      base.UserError: a broken line, by file and number.
    """
    return [row for _, row in _lines(pathlib.Path(workdir) / METRICS)]


def say(text: str) -> None:
    """Tell the user on stderr, where the progress is too; of several processes one speaks."""
    if hosts.first():
        print(text, file=sys.stderr, flush=True)


class Progress:
    """Shows a run's progress on stderr: a bar in a terminal, else a line now and then."""

    def __init__(
        self,
        total: int,
        first_step: int,
        stream: io.TextIOBase | None = None,
        interval_s: float = 10.0,  # between plain lines; the first and the last always come
    ):
        self.total = total
        self.stream = stream or (sys.stderr if hosts.first() else open(os.devnull, "w"))
        self.interval_s = interval_s
        self.last_s = -math.inf
        self.unshown = ""
        self.bar = None
        if self.stream.isatty():
            self.bar = tqdm.tqdm(
                total=total, initial=first_step, file=self.stream, unit="step", dynamic_ncols=True
            )

    def phase(self, text: str) -> None:
        """Show what goes on, such as "rollout"; plain output leaves it out."""
        if self.bar is not None:
            self.bar.set_description_str(text)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that `step` (from 0) is done."""
        text = _brief(metrics)
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step + 1 - self.bar.n)
            return
        now = time.monotonic()
        self.unshown = f"step {step + 1}/{self.total}  {text}"
        if step + 1 == self.total or now - self.last_s >= self.interval_s:
            self.last_s = now
            self._flush()

    def note(self, text: str) -> None:
        """Say something beside the steps, such as a warning."""
        if self.bar is not None:
            self.bar.write(text, file=self.stream)
        else:
            print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it is and free its line; plain output ends with the last step."""
        if self.bar is not None:
            self.bar.close()
        self._flush()

    def _flush(self) -> None:
        if self.unshown:
            print(self.unshown, file=self.stream, flush=True)
        self.unshown = ""


def _brief(metrics: Mapping[str, Any]) -> str:
    shown = (
        ("reward", "reward", ".3f"),
        ("accept", "spec/accept_length", ".2f"),
        ("tok/s", "rollout/tokens_per_s", ".0f"),
        ("length", "completions/mean_length", ".0f"),
        ("loss", "loss", ".4f"),
    )
    there = [(label, metrics.get(key), form) for label, key, form in shown]
    return "  ".join(f"{label} {value:{form}}" for label, value, form in there if value is not None)


def _mean(values: Float[np.ndarray, " N"]) -> float:
    known = values[~np.isnan(values)]
    return float(np.mean(known)) if len(known) else math.nan


def _deviation(values: Float[np.ndarray, " N"]) -> float:
    known = values[~np.isnan(values)]
    # Equal values are 0 exactly; their computed mean may differ from them by rounding.
    if len(known) < 2 or np.all(known == known[0]):
        return 0.0
    return float(np.std(known, ddof=1))


def _open_board(workdir: pathlib.Path, first_step: int) -> Any:
    try:
        import tensorboardX  # an extra
    except ImportError as error:
        raise base.UserError(
            "log.tensorboard is True but tensorboardX is missing: pip install 'fastgrpo-jax[log]'"
        ) from error
    return tensorboardX.SummaryWriter(str(workdir / TENSORBOARD), purge_step=first_step)


def _append(path: pathlib.Path) -> io.TextIOBase:
    # A lone surrogate that a model emits is written as \ud800, which is JSON too.
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_plain(row), allow_nan=False, ensure_ascii=False, default=str) + "\n"


def _plain(value: Any) -> Any:
    """Turn values into what JSON has: numbers of any library, null for non-finite ones."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy and JAX scalars and arrays
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _lines(path: pathlib.Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Read (raw line, row) pairs, without a torn last line."""
    if not path.exists():
        return []
    raw = path.read_bytes().splitlines()
    pairs = []
    for number, line in enumerate(raw, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            pairs.append((line, row))
        elif number < len(raw):
            raise base.UserError(
                f"{path}, line {number} is no JSON row: {line[:80]!r}; mend or remove it"
            )
    return pairs


def _drop(path: pathlib.Path, first_step: int) -> None:
    """Drop the lines of `first_step` and later; a kill leaves the old file or the new one."""
    if not path.exists():
        return
    kept = [line for line, row in _lines(path) if row["step"] < first_step]
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
