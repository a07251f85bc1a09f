"""Tasks as streams of rows, and their rendering into prompt tokens.

A task maps a place in its stream to a row, and nothing else: the place is all that a
checkpoint must keep, and noise is addressed by it.
"""

import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.train import tasks

OVERLONG = ("error", "drop", "truncate_left")
ALLOWED = "addition | arithmetic | FILE.jsonl | datasets:NAME[:SPLIT]"
_MAX_DROPPED = 1000  # overlong prompts in a row before `drop` gives up


class Task(NamedTuple):
    """A stream of rows.

    Attributes:
      name: as in `task.name`.
      size: rows per epoch; None for an endless source.
      row: place in the stream -> {"prompt": text or messages, **columns}, a pure function.
    """

    name: str
    size: int | None
    row: Callable[[int], dict[str, Any]]


class Prompt(NamedTuple):
    """A rendered row.

    Attributes:
      place: its place in the stream.
      prompt: the row's own prompt, as rewards see it.
      text: what the model reads.
      ids: tokens of `text`.
      columns: the row's other columns, for rewards.
    """

    place: int
    prompt: str | list[dict[str, Any]]
    text: str
    ids: tuple[int, ...]
    columns: dict[str, Any]


class Rendering(NamedTuple):
    """How rows become tokens: a Hugging Face tokenizer and the `task` keys of these names."""

    tokenizer: Any
    system: str
    chat: bool
    max_prompt_length: int
    overlong: str


def open_task(name: str, *, seed: int, shuffle: bool, max_operand: int, max_terms: int) -> Task:
    """Open a task by name and check its whole source.

    A finite source starts a new epoch when it is through, reshuffled if `shuffle`. `datasets:`
    takes a hub name (owner/name or owner/name/config), a directory saved by `save_to_disk`,
    a folder of data files, or a .parquet file; SPLIT is `train` unless given.

    Raises:
      base.UserError: unknown name, unreadable source (file, line and fault), bad sizes.
    """
    if name in ("addition", "arithmetic"):
        if max_operand < 1:
            raise base.UserError(f"task.max_operand is {max_operand}; it must be at least 1")
        if max_terms < 2:
            raise base.UserError(f"task.max_terms is {max_terms}; it must be at least 2")
        if name == "addition":
            return Task(name, None, lambda place: tasks.addition(seed, place, max_operand))
        make = tasks.arithmetic
        return Task(name, None, lambda place: make(seed, place, max_operand, max_terms))
    if name.startswith("datasets:"):
        size, fetch = tasks.open_datasets(name)
    elif name.endswith(".jsonl"):
        rows = tasks.read_jsonl(name)
        size, fetch = len(rows), lambda i: dict(rows[i])
    else:
        near = difflib.get_close_matches(name, ["addition", "arithmetic"], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise base.UserError(f"task.name is {name!r}{hint}; allowed: {ALLOWED}")

    @functools.lru_cache(maxsize=2)  # a step may straddle two epochs
    def order(epoch: int) -> np.ndarray:
        if not shuffle:
            return np.arange(size)
        return np.argsort(tasks.draws(seed, tasks.ORDER, epoch, size), kind="stable")

    def row(place: int) -> dict[str, Any]:
        epoch, i = divmod(place, size)
        return fetch(int(order(epoch)[i]))

    return Task(name, size, row)


def take(
    task: Task, cursor: int, count: int, rendering: Rendering
) -> tuple[list[Prompt], int, int]:
    """Render the next `count` prompts of a task from place `cursor`.

    Returns:
      The prompts, the next cursor, and how many prompts were dropped or truncated.

    Raises:
      base.UserError: an overlong prompt under `error`, or nothing but overlong ones under
        `drop` (a whole epoch, or 1000 in a row).
    """
    limit, policy = rendering.max_prompt_length, rendering.overlong
    if policy not in OVERLONG:
        raise base.UserError(f"task.overlong_prompt is {policy!r}; allowed: {', '.join(OVERLONG)}")
    if limit < 1:
        raise base.UserError(f"task.max_prompt_length is {limit}; it must be at least 1")
    patience = min(_MAX_DROPPED, task.size or _MAX_DROPPED)
    prompts, changed, in_a_row = [], 0, 0
    while len(prompts) < count:
        prompt = render(task.row(cursor), cursor, rendering)
        cursor += 1
        overlong = len(prompt.ids) > limit
        changed += overlong
        in_a_row = in_a_row + 1 if overlong else 0
        if not overlong:
            prompts.append(prompt)
        elif policy == "truncate_left":
            prompts.append(_truncate_left(prompt, rendering))
        elif policy == "error":
            raise base.UserError(
                f"prompt at place {prompt.place} of {task.name} has {len(prompt.ids)} tokens, "
                f"over task.max_prompt_length = {limit}; raise the limit, or set "
                "task.overlong_prompt to drop or truncate_left"
            )
        elif in_a_row >= patience:
            raise base.UserError(
                f"task.overlong_prompt is drop, and {in_a_row} prompts in a row of {task.name} "
                f"(the last at place {prompt.place}, {len(prompt.ids)} tokens) are over "
                f"task.max_prompt_length = {limit}; raise the limit"
            )
    return prompts, cursor, changed


def render(row: dict[str, Any], place: int, rendering: Rendering) -> Prompt:
    """Render a row to text and tokens, whatever its length.

    The start token is there once if the template or the tokenizer puts it, and never twice;
    no end token is added.

    Raises:
      base.UserError: empty or malformed prompt, or no chat template where one is needed.
    """
    prompt = row["prompt"]
    fault = tasks.prompt_fault(prompt)
    if fault:
        raise base.UserError(f"prompt at place {place} {fault}")
    tokenizer = rendering.tokenizer
    if rendering.chat or not isinstance(prompt, str):
        text = _chat_text(prompt, place, rendering)
    elif rendering.system:
        raise base.UserError(
            f"task.system is {rendering.system!r}, but a text prompt with task.chat=False has no "
            "system message; set task.chat=True or leave task.system empty"
        )
    else:
        text = prompt
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:1] != [bos] and list(tokenizer.encode("a"))[:1] == [bos]:
        ids = [bos, *ids]
    if not ids:
        raise base.UserError(f"prompt at place {place} has no tokens: {text!r}")
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return Prompt(place, prompt, text, tuple(ids), columns)


def repeated_columns(prompts: Sequence[Prompt], group: int) -> dict[str, list]:
    """Collect the columns of all rows of a rollout, [P * group] each; absent ones are None."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return {
        name: [prompt.columns.get(name) for prompt in prompts for _ in range(group)]
        for name in names
    }


def _chat_text(prompt: str | list, place: int, rendering: Rendering) -> str:
    tokenizer = rendering.tokenizer
    if not tokenizer.chat_template:
        cure = (
            "set task.chat=False"
            if isinstance(prompt, str)
            else "give text prompts, task.chat=False"
        )
        raise base.UserError(
            f"the tokenizer has no chat template for the prompt at place {place}; {cure}, "
            "or use a model whose tokenizer has one"
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if rendering.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": rendering.system}, *messages]
    unfinished = messages[-1]["role"] == "assistant"  # the model goes on with this turn
    try:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,  # with True, transformers 5 gives a dict
            add_generation_prompt=not unfinished,
            continue_final_message=unfinished,
        )
    except jinja2.TemplateError as error:
        raise base.UserError(
            f"the chat template refuses the prompt at place {place}: {error}"
        ) from error


def _truncate_left(prompt: Prompt, rendering: Rendering) -> Prompt:
    """Keep the last tokens of a prompt, and its start token where it has one."""
    head = prompt.ids[:1] if prompt.ids[0] == rendering.tokenizer.bos_token_id else ()
    kept = rendering.max_prompt_length - len(head)
    ids = head + prompt.ids[len(prompt.ids) - kept :]
    return prompt._replace(ids=ids, text=rendering.tokenizer.decode(ids))
