"""Reward functions: loading, calling, adding up.

The signature is TRL's, `fn(prompts, completions, **columns) -> list[float | None]`, called by
keyword with the names that the function takes. None means "not applicable to this row": it
is neither 0 nor part of any mean. Completions are texts for text prompts and a list of one
assistant message for prompts given as messages. Built in are `exact_number` and `format`.
"""

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import math
import pathlib
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float

from fastgrpo_jax import base
from fastgrpo_jax.train import tasks

ON_ERROR = ("raise", "none")
LARGEST = 1e9  # reward: squares of larger ones leave float32 no digits


class Reward(NamedTuple):
    """A reward function, the name its metrics carry, and its weight in the sum."""

    name: str
    fn: Callable
    weight: float


class Scores(NamedTuple):
    """Rewards of N rows.

    Attributes:
      total: weighted sum over the functions that gave a value; NaN where none did.
      parts: each function's own values; NaN for None.
      failures: values lost to `on_error="none"`, over all functions.
    """

    total: Float[np.ndarray, " N"]
    parts: dict[str, Float[np.ndarray, " N"]]
    failures: int


def exact_number(completions: list, answer: list) -> list[float | None]:
    """Score 1 if the completion's number equals the `answer` column, 0 if not, None without one.

    The number is the last one marked by <answer>7</answer>, \\boxed{7} or #### 7, or else the
    last in the text; 7.0 equals 7, and "$1,234." is 1234.
    """
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        wanted = None if expected is None else tasks.to_number(expected)
        if wanted is None and expected is not None:
            raise ValueError(f"the answer {expected!r} is not a number")
        number = tasks.final_answer(_text(completion))
        scores.append(None if wanted is None else float(number == wanted))
    return scores


def format_(completions: list) -> list[float]:
    """Score 1 if exactly one number is marked as the answer, else 0.

    Marks are <answer>7</answer>, \\boxed{7} and #### 7. Two marks score 0: a completion that
    lists candidates has not answered.
    """
    return [float(len(tasks.marked_numbers(_text(c))) == 1) for c in completions]


BUILT_IN = {"exact_number": exact_number, "format": format_}


def load_rewards(functions: str, weights: str) -> tuple[Reward, ...]:
    """Load comma-separated reward functions: built-in names, module:function, FILE.py:function.

    Args:
      functions: as in `reward.functions`.
      weights: as in `reward.weights`: a number per function; empty for all 1.

    Raises:
      base.UserError: anything that cannot be found, called or counted.
    """
    specs = [spec.strip() for spec in functions.split(",")]
    texts = [text.strip() for text in weights.split(",")] if weights.strip() else ["1"] * len(specs)
    if len(texts) != len(specs):
        raise base.UserError(
            f"reward.weights has {len(texts)} numbers ({weights}) for {len(specs)} functions "
            f"({functions}); give one per function, or leave it empty for all 1"
        )
    named = [(spec.rpartition(":")[2], _load(spec)) for spec in specs]
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1:
            raise base.UserError(
                f"reward.functions is {functions!r}: {name} comes twice, and metrics go by name; "
                "rename one"
            )
    return tuple(Reward(name, fn, _weight(text)) for (name, fn), text in zip(named, texts))


def check_columns(rewards: Sequence[Reward], columns: Collection[str]) -> None:
    """Refuse reward functions that need a column the data lacks; call it before any rollout.

    Raises:
      base.UserError: naming the function, the column, and the columns there are.
    """
    given = {"prompts", "completions", "completion_ids", *columns}
    for reward in rewards:
        parameters = inspect.signature(reward.fn).parameters.values()
        for p in parameters:
            if p.kind is p.POSITIONAL_ONLY:
                raise base.UserError(
                    f"reward function {reward.name}: its argument {p.name} is positional-only; "
                    "functions are called by keyword"
                )
            variadic = p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if not variadic and p.default is p.empty and p.name not in given:
                raise base.UserError(
                    f"reward function {reward.name} needs the column {p.name}; "
                    f"the data has: {', '.join(sorted(columns)) or 'none'}"
                )


def score(
    rewards: Sequence[Reward],
    prompts: list,
    completions: list[str],
    completion_ids: list,
    columns: dict[str, list],
    on_error: str,
) -> Scores:
    """Score N rows by every function.

    Args:
      prompts: each row's prompt, text or messages.
      completions: the response texts.
      completion_ids: the response tokens, handed to functions that take them.
      columns: the data's columns, N values each.
      on_error: `raise` ends the run on a function that fails or gives something else than
        finite numbers and None; `none` makes the values that are lost None, and counts them.

    Raises:
      base.UserError: as `on_error` says; always for a missing column or a wrong count.
    """
    if on_error not in ON_ERROR:
        raise base.UserError(f"reward.on_error is {on_error!r}; allowed: {', '.join(ON_ERROR)}")
    check_columns(rewards, columns)
    shaped = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    given = {"prompts": prompts, "completions": shaped, "completion_ids": completion_ids, **columns}
    parts, failures = {}, 0
    for reward in rewards:
        values, lost = _call(reward, given, len(prompts), on_error)
        parts[reward.name] = values
        failures += lost
    total, known = np.zeros(len(prompts)), np.zeros(len(prompts), bool)
    for reward in rewards:
        there = ~np.isnan(parts[reward.name])
        total[there] += reward.weight * parts[reward.name][there]
        known |= there
    return Scores(np.where(known, total, np.nan), parts, failures)


def _call(
    reward: Reward, given: dict[str, list], rows: int, on_error: str
) -> tuple[Float[np.ndarray, " N"], int]:
    """Call one function: its values (NaN for None), and how many were lost to a fault."""
    parameters = inspect.signature(reward.fn).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # Copies: a function that sorts or pops a list must not change what the next one sees.
    arguments = {k: list(v) for k, v in given.items() if takes_all or k in parameters}
    try:
        result = reward.fn(**arguments)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except (Exception, SystemExit) as error:  # a function that calls sys.exit fails like others
        message = f"reward function {reward.name} failed on {rows} rows: {_fault(reward.fn, error)}"
        if on_error == "raise":
            print(traceback.format_exc(), file=sys.stderr)  # the user's own code: show all of it
            raise base.UserError(message) from error
        logging.warning("%s; its rows count as None", message, exc_info=True)
        return np.full(rows, np.nan), rows
    count = len(result) if hasattr(result, "__len__") and not isinstance(result, str) else None
    if isinstance(result, Mapping | Set):  # has a length, but no order of rows
        count = None
    if count != rows:
        got = f"{count} values" if count is not None else f"{result!r:.80}"
        raise base.UserError(
            f"reward function {reward.name} gave {got} for {rows} rows; "
            "it must give a list with a number or None per row"
        )
    return _values(reward.name, result, on_error)


def _fault(fn: Callable, error: BaseException) -> str:
    """Tell an error on one line: its type, its text, and the last line of the user's own file."""
    frames = traceback.extract_tb(error.__traceback__)[1:] or traceback.extract_tb(
        error.__traceback__
    )
    own = inspect.getsourcefile(inspect.unwrap(fn)) if inspect.isroutine(fn) else None
    last = next((f for f in reversed(frames) if f.filename == own), frames[-1])
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return f"{text} ({pathlib.Path(last.filename).name}:{last.lineno})"


def _values(name: str, result: Any, on_error: str) -> tuple[Float[np.ndarray, " N"], int]:
    values, lost = np.full(len(result), np.nan), 0
    for i, value in enumerate(result):
        if value is None:
            continue
        number = _finite(value)
        if number is None and on_error == "raise":
            raise base.UserError(
                f"reward function {name} gave {value!r} for row {i}; "
                f"allowed: a finite number of at most {LARGEST:g}, or None where it does not apply"
            )
        if number is None:
            lost += 1
        else:
            values[i] = number
    if lost:
        logging.warning("reward function %s: %d values are no finite numbers", name, lost)
    return values, lost


def _finite(value: Any) -> float | None:
    """Read a number of any library (True is 1); None for texts, NaN, infinities and the rest."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: torch, numpy-likes
        return None
    return number if abs(number) <= LARGEST else None  # NaN is not


def _load(spec: str) -> Callable:
    if ":" not in spec:
        if spec in BUILT_IN:
            return BUILT_IN[spec]
        near = difflib.get_close_matches(spec, BUILT_IN, n=1, cutoff=0.4)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise base.UserError(
            f"reward.functions names {spec!r}{hint}; "
            f"allowed: {', '.join(BUILT_IN)}, module:function, FILE.py:function"
        )
    place, _, attribute = spec.rpartition(":")
    module = _load_file(place) if place.endswith(".py") else _import(place)
    fn = getattr(module, attribute, None)
    if fn is None:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise base.UserError(f"reward function {spec}: {place} has no {attribute!r}{hint}")
    if not callable(fn):
        raise base.UserError(f"reward function {spec} is {fn!r:.80}; it must be callable")
    return fn


def _load_file(path: str) -> Any:
    if not pathlib.Path(path).is_file():
        raise base.UserError(f"reward.functions: there is no file {path}")
    name = f"fastgrpo_reward_{pathlib.Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise base.UserError(f"reward.functions: {path} fails to load: {error!r}") from error
    return module


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise base.UserError(f"reward.functions: cannot import {name!r}: {error!r}") from error


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise base.UserError(f"reward.weights has {text!r}; it must be a finite number")
    return weight


def _text(completion: str | list) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]
