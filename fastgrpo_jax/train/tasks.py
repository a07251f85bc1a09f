"""Where rows come from (procedural, JSONL, data sets), and the numbers in a text.

A draw is a function of (seed, stream, place) alone, so that a row never depends on the rows
read before it, and a resumed run sees the same data. Raw Philox words are used because NumPy
pins them across versions, which it does not do for the methods of its Generator. Files and
data sets are checked when they are opened: a bad row is answered at start, not after hours.
"""

import decimal
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from fastgrpo_jax import base

ADDITION, ARITHMETIC, ORDER = 1, 2, 3  # streams: draws of one never meet those of another
_RESERVED = ("prompts", "completions", "completion_ids")  # a reward's other arguments

# Digits with or without thousands separators and a fraction; the sign is judged apart.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
_NUMBER = re.compile(_DIGITS)
# A minus right before a number (a currency sign may stand between) is its sign, unless
# something stands before it that it can subtract from: "5-3", "x-3", "5 -3", "(1) -3".
_MINUS = re.compile(r"[-\u2212]\\?\$?\Z")
_BINARY_MINUS = re.compile(r"(?:[\w)\]}%]|[0-9)\]}%][ \t]+)[-\u2212]\\?\$?\Z")

# Possessive blanks: thousands of them must not make a search quadratic.
_AMOUNT = rf"\s*+([-\u2212+]?\\?\$?[-\u2212]?(?:{_DIGITS}))"
_UNIT = r"\s*+(?:\\?%)?\.?\s*+"
_MARKED = re.compile(
    rf"<answer>{_AMOUNT}{_UNIT}</answer>|\\boxed\{{{_AMOUNT}{_UNIT}\}}|####{_AMOUNT}"
)


def draws(seed: int, stream: int, place: int, count: int) -> np.ndarray:
    """Draw `count` uniform uint64 words at an address (Philox 4x64-10, by counter)."""
    key = seed % 2**64 | stream << 64
    return np.random.Philox(key=key, counter=int(place) << 64).random_raw(count)


def addition(seed: int, place: int, max_operand: int) -> dict[str, Any]:
    """Make the row "What is a + b?" at a place, a and b uniform in 1..max_operand."""
    a, b = (1 + word % max_operand for word in draws(seed, ADDITION, place, 2).tolist())
    return {"prompt": f"What is {a} + {b}?", "answer": a + b}


def arithmetic(seed: int, place: int, max_operand: int, max_terms: int) -> dict[str, Any]:
    """Make the row "Compute 3 + 4 * 2 - 5 step by step." at a place.

    The number of terms is log-uniform over 2..max_terms: most chains are short and a few
    long, so that difficulty and response lengths have a tail. Operands are uniform in
    1..max_operand, operators uniform over + - *.
    """
    words = draws(seed, ARITHMETIC, place, 2 * max_terms).tolist()
    terms = min(max_terms, int(2 * ((max_terms + 1) / 2) ** (words[0] / 2**64)))
    numbers = [1 + word % max_operand for word in words[1 : 1 + terms]]
    operators = ["+-*"[word % 3] for word in words[1 + max_terms : max_terms + terms]]
    chain = " ".join(f"{op} {n}" for op, n in zip(operators, numbers[1:], strict=True))
    prompt = f"Compute {numbers[0]} {chain} step by step."
    return {"prompt": prompt, "answer": evaluate(numbers, operators)}


def evaluate(numbers: list[int], operators: list[str]) -> int:
    """Compute a chain of + - * with the usual precedence: n operators between n + 1 numbers."""
    total, product = 0, numbers[0]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            product *= number
        else:
            total += product
            product = number if operator == "+" else -number
    return total + product


def prompt_fault(prompt: Any) -> str:
    """Say what is wrong with a prompt; empty if nothing is."""
    if isinstance(prompt, str):
        return _text_fault(prompt) or ("" if prompt.strip() else "is empty")
    if not isinstance(prompt, list):
        return f"is {prompt!r}; it must be a text or a list of messages"
    for message in prompt:
        if not isinstance(message, dict):
            return f"has the message {message!r}; it must be an object with role and content"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                return f"has a message whose {key} is {message.get(key)!r}; it must be a text"
            if _text_fault(message[key]):
                return f"has a message whose {key} {_text_fault(message[key])}"
    return "" if any(message["content"].strip() for message in prompt) else "is empty"


def _text_fault(text: str) -> str:
    """JSON can spell half of a surrogate pair (\\ud800), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds {text[error.start]!r} at character {error.start}, which is no Unicode text"
    return ""


def normalise(raw: Any, where: str) -> dict[str, Any]:
    """Bring a row of any known layout to {"prompt": ..., **columns}.

    NaN becomes None; `question` stands for `prompt`; GSM8K's "... #### 42" becomes `answer` 42
    beside `solution`; verl's reward_model.ground_truth becomes `answer`.
    """
    if not isinstance(raw, dict):
        raise base.UserError(f"{where}: a row must be an object, this is {raw!r:.80}")
    row = {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in raw.items()}
    if "prompt" not in row:
        if "question" not in row:
            raise base.UserError(f"{where}: no prompt or question; columns: {', '.join(row)}")
        row["prompt"] = row.pop("question")
    taken = [name for name in _RESERVED if name in row]
    if taken:
        raise base.UserError(f"{where}: column {taken[0]} is an argument of rewards; rename it")
    fault = prompt_fault(row["prompt"])
    if fault:
        raise base.UserError(f"{where}: the prompt {fault}")
    if isinstance(row["prompt"], list):  # Arrow fills the keys that a message lacks with None
        row["prompt"] = [{k: v for k, v in m.items() if v is not None} for m in row["prompt"]]
    verl = row.get("reward_model")
    if isinstance(verl, dict) and "answer" not in row:
        row["answer"] = verl.get("ground_truth")
    answer = row.get("answer")
    if isinstance(answer, str) and "####" in answer:
        row["answer"] = gsm8k_answer(answer)
        row.setdefault("solution", answer)
    return row


def read_jsonl(path: str) -> list[dict[str, Any]]:
    """Read and check all rows of a file; a column that a row lacks is None there.

    Raises:
      base.UserError: unreadable file, or a bad row, by file, line and fault.
    """
    try:
        lines = pathlib.Path(path).read_bytes().splitlines()
    except OSError as error:
        raise base.UserError(f"task.name is {path!r}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            raw = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:
            raise base.UserError(f"{where}: not valid JSON: {error}") from error
        rows.append(normalise(raw, where))
    if not rows:
        raise base.UserError(f"task.name is {path!r}: the file has no rows")
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def open_datasets(name: str) -> tuple[int, Callable[[int], dict[str, Any]]]:
    """Open `datasets:NAME[:SPLIT]` and check its prompts: (rows, index -> row).

    Raises:
      base.UserError: no such data set or split, or a bad row.
    """
    dataset = _load_dataset(name)
    if not len(dataset):
        raise base.UserError(f"task.name is {name!r}: the data set has no rows")
    columns = dataset.column_names
    source = "prompt" if "prompt" in columns else "question"
    if source not in columns:
        raise base.UserError(f"{name}: no prompt or question; columns: {', '.join(columns)}")
    for i, raw in enumerate(dataset.select_columns([source])):
        normalise(raw, f"{name}, row {i}")

    def fetch(i: int) -> dict[str, Any]:
        return normalise(dataset[i], f"{name}, row {i}")

    fetch(0)  # the other columns are alike in all rows
    return len(dataset), fetch


def _load_dataset(name: str) -> Any:
    import datasets  # takes seconds to import, and only this source needs it

    path, _, split = name.removeprefix("datasets:").partition(":")
    if not path:
        raise base.UserError(
            f"task.name is {name!r}; allowed: datasets:NAME or datasets:NAME:SPLIT"
        )
    folder = pathlib.Path(path)
    owner, _, rest = path.partition("/")
    repository, _, config = rest.partition("/")
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            loaded = datasets.load_from_disk(path)
        elif path.endswith(".parquet"):
            loaded = datasets.load_dataset("parquet", data_files=path, split=split or "train")
        elif config and not folder.exists():
            repository = f"{owner}/{repository}"
            loaded = datasets.load_dataset(repository, config, split=split or "train")
        else:
            loaded = datasets.load_dataset(path, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise base.UserError(f"task.name is {name!r}: {error}") from error
    if isinstance(loaded, dict):
        if (split or "train") not in loaded:
            raise base.UserError(f"task.name is {name!r}; its splits are {', '.join(loaded)}")
        return loaded[split or "train"]
    if split and (folder / "state.json").exists():
        raise base.UserError(f"task.name is {name!r}, but {path} has no splits; leave {split} out")
    return loaded


def last_number(text: str) -> decimal.Decimal | None:
    """Return the last number of a text, or None.

    "1,234" is one number, "1, 2" two; "$", "%" and a full stop are no part of it; "5-3" ends
    in 3, "= -3" in -3. Exponents and fractions are not read. Nothing is ever evaluated.
    """
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    value = decimal.Decimal(matches[-1][0].replace(",", ""))
    before = text[: matches[-1].start()]
    negative = _MINUS.search(before) and not _BINARY_MINUS.search(before)
    return value.copy_negate() if negative else value


def marked_numbers(text: str) -> list[decimal.Decimal]:
    r"""Return the numbers marked as answers: <answer>7</answer>, \boxed{7} or #### 7."""
    groups = (next(group for group in match.groups() if group) for match in _MARKED.finditer(text))
    return [last_number(group) for group in groups]


def final_answer(text: str) -> decimal.Decimal | None:
    """Return the last marked number, or else the last number of the text, or None."""
    marked = marked_numbers(text)
    return marked[-1] if marked else last_number(text)


def to_number(value: Any) -> decimal.Decimal | None:
    """Read a data column's answer (a number, or a text that holds one); None if it has none."""
    if isinstance(value, str):
        return final_answer(value)
    try:
        number = decimal.Decimal(str(value))  # by str: the float 0.1 is the text "0.1"
    except decimal.InvalidOperation:
        return None
    return number if number.is_finite() else None


def gsm8k_answer(solution: str) -> int | float | str:
    """Extract what follows the last "####" of a worked solution: a number if it is one."""
    text = solution.rpartition("####")[2].strip()
    number = last_number(text)
    if number is None:
        return text
    return int(number) if number == number.to_integral_value() else float(number)
