"""Laws of task streams and of their rendering into tokens."""

import json

import datasets
import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, processors

from fastgrpo_jax import base
from fastgrpo_jax.train import data, tasks

BOS, END, USER, BOT, SYS = 1, 2, 3, 4, 5
WORDS = ["<unk>", "<s>", "</s>", "<user>", "<bot>", "<sys>", "a", "b", "c", "d", "What", "is"]
TEMPLATE = (
    "{% for m in messages %}<{{ {'user': 'user', 'assistant': 'bot', 'system': 'sys'}[m.role] }}> "
    "{{ m.content }}{% if not loop.last %} </s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %} <bot>{% endif %}"
)


def make_tokenizer(adds_bos=False, template=TEMPLATE):
    core = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", BOS)])
    special = {"additional_special_tokens": ["<user>", "<bot>", "<sys>"]}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **special
    )
    tokenizer.chat_template = template
    return tokenizer


def rendering(tokenizer=None, system="", chat=False, limit=8, overlong="error"):
    return data.Rendering(tokenizer or make_tokenizer(), system, chat, limit, overlong)


def open_task(name, seed=0, shuffle=False, max_operand=20, max_terms=5):
    return data.open_task(
        str(name), seed=seed, shuffle=shuffle, max_operand=max_operand, max_terms=max_terms
    )


def jsonl(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def listed(prompts):
    """Make an unshuffled task of these prompts."""
    return data.Task("listed", len(prompts), lambda p: {"prompt": prompts[p % len(prompts)]})


# ---- procedural tasks ----


@pytest.mark.parametrize("name", ["addition", "arithmetic"])
def test_a_row_depends_on_seed_and_place_alone(name):
    task = open_task(name, seed=3)
    forward = [task.row(i) for i in range(20)]
    again = open_task(name, seed=3)
    assert [again.row(i) for i in reversed(range(20))] == forward[::-1]
    assert [open_task(name, seed=4).row(i) for i in range(20)] != forward
    assert len({row["prompt"] for row in forward}) > 10
    assert task.size is None


def test_draws_are_pinned():
    """The stream is Philox 4x64-10 itself: a data order saved today must be the same for ever."""
    word = np.random.Philox(key=7 | 2 << 64, counter=[0, 5, 0, 0]).random_raw(3)
    np.testing.assert_array_equal(tasks.draws(7, 2, 5, 3), word)
    assert open_task("addition", seed=0).row(0) == {"prompt": "What is 19 + 2?", "answer": 21}


def test_addition_asks_for_the_sum_of_operands_in_range():
    task = open_task("addition", max_operand=3)
    seen = set()
    for place in range(200):
        row = task.row(place)
        what, is_, a, plus, b = row["prompt"].removesuffix("?").split()
        assert (what, is_, plus) == ("What", "is", "+") and row["answer"] == int(a) + int(b)
        seen.add((int(a), int(b)))
    assert seen == {(a, b) for a in (1, 2, 3) for b in (1, 2, 3)}


def test_arithmetic_answers_are_what_python_computes_and_lengths_have_a_tail():
    task = open_task("arithmetic", max_operand=9, max_terms=6)
    counts = np.zeros(7, int)
    for place in range(600):
        row = task.row(place)
        chain = row["prompt"].removeprefix("Compute ").removesuffix(" step by step.")
        assert row["answer"] == eval(chain) and isinstance(row["answer"], int)
        numbers, operators = chain.split()[::2], chain.split()[1::2]
        assert set(operators) <= set("+-*") and all(1 <= int(n) <= 9 for n in numbers)
        counts[len(numbers)] += 1
    # log-uniform: P(n) = log((n + 1) / n) / log(7 / 2), 0.32 of two terms down to 0.12 of six
    expected = [600 * np.log((n + 1) / n) / np.log(3.5) for n in range(2, 7)]
    np.testing.assert_allclose(counts[2:], expected, atol=40)
    assert counts[:2].sum() == 0


def test_evaluation_has_precedence():
    assert tasks.evaluate([3, 4, 2, 5], ["+", "*", "-"]) == 6
    assert tasks.evaluate([2, 3, 4, 5], ["-", "*", "*"]) == -58
    assert tasks.evaluate([7], []) == 7


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("additon", {}, "did you mean addition"),
        ("rows.json", {}, "FILE.jsonl"),
        ("addition", {"max_operand": 0}, "task.max_operand is 0"),
        ("arithmetic", {"max_terms": 1}, "task.max_terms is 1"),
        ("missing.jsonl", {}, "No such file"),
        ("datasets:missing/folder/x", {}, "datasets:missing/folder/x"),
    ],
)
def test_a_bad_task_is_answered(name, sizes, message):
    with pytest.raises(base.UserError, match=message):
        open_task(name, **sizes)


# ---- epochs ----


def test_each_epoch_holds_every_row_once_in_an_order_of_its_own(tmp_path):
    """F2"""
    path = jsonl(tmp_path, *[{"prompt": f"p{i}"} for i in range(40)])
    task = open_task(path, seed=1, shuffle=True)
    epochs = [[task.row(e * 40 + i)["prompt"] for i in range(40)] for e in range(3)]
    assert all(sorted(e) == sorted(epochs[0]) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    again = open_task(path, seed=1, shuffle=True)
    assert [again.row(80 + i)["prompt"] for i in range(40)] == epochs[2]
    assert [open_task(path, seed=2, shuffle=True).row(i)["prompt"] for i in range(40)] != epochs[0]
    plain = open_task(path)
    assert [plain.row(i)["prompt"] for i in range(80)] == [f"p{i}" for i in range(40)] * 2


# ---- JSONL and data sets ----


def test_columns_missing_in_some_rows_are_none(tmp_path):
    """A13"""
    path = jsonl(tmp_path, {"prompt": "a", "hint": 1}, "", '{"prompt": "b", "extra": NaN}')
    task = open_task(path)
    assert task.size == 2
    assert task.row(0) == {"prompt": "a", "hint": 1, "extra": None}
    assert task.row(1) == {"prompt": "b", "hint": None, "extra": None}


def test_gsm8k_rows_give_the_number_and_keep_the_solution(tmp_path):
    worked = "She has 1200 + 34.\n#### 1,234"
    path = jsonl(
        tmp_path,
        {"question": "How many?", "answer": worked},
        {"question": "Where?", "answer": "So #### north"},
        {"question": "Price?", "answer": "#### $-2.50"},
    )
    task = open_task(path)
    assert task.row(0) == {"prompt": "How many?", "answer": 1234, "solution": worked}
    assert isinstance(task.row(0)["answer"], int)
    assert task.row(1)["answer"] == "north"
    assert task.row(2)["answer"] == -2.5


def test_verl_rows_give_the_ground_truth_as_answer(tmp_path):
    message = [{"role": "user", "content": "a b"}]
    truth = {"style": "rule", "ground_truth": "72"}
    row = {"data_source": "x", "prompt": message, "reward_model": truth}
    task = open_task(jsonl(tmp_path, row, {**row, "answer": "its own"}))
    assert task.row(0) == {**row, "answer": "72"}
    assert task.row(1) == {**row, "answer": "its own"}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        ("[1]", "must be an object"),
        ('{"text": "a"}', "no prompt or question; columns: text"),
        ('{"prompt": ""}', "is empty"),
        ('{"prompt": []}', "is empty"),
        ('{"prompt": 5}', "must be a text or a list"),
        ('{"prompt": ["a"]}', "role and content"),
        ('{"prompt": [{"role": "user"}]}', "content is None"),
        ('{"prompt": "a", "completions": 1}', "rename it"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_fault(tmp_path, line, fault):
    path = jsonl(tmp_path, {"prompt": "fine"}, "", line, {"prompt": "fine"})
    with pytest.raises(base.UserError, match=fault) as caught:
        open_task(path)
    assert f"{path}, line 3" in str(caught.value)


def test_bytes_that_are_no_text_are_named_by_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "fine"}\r\n{"prompt": "\xff"}\n')
    with pytest.raises(base.UserError, match="line 2: not valid JSON"):
        open_task(path)


def test_a_file_without_rows_is_refused(tmp_path):
    with pytest.raises(base.UserError, match="no rows"):
        open_task(jsonl(tmp_path, "", " "))


def test_saved_data_sets_are_read_by_split(tmp_path):
    rows = {
        "prompt": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
        "reward_model": [{"ground_truth": "1"}, {"ground_truth": "2"}],
        "extra_info": [float("nan"), 0.5],
    }
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)})
    saved.save_to_disk(tmp_path / "saved")
    task = open_task(f"datasets:{tmp_path}/saved")
    assert task.size == 2
    assert task.row(1)["prompt"] == [{"role": "user", "content": "b"}]
    assert (task.row(1)["answer"], task.row(0)["extra_info"]) == ("2", None)
    with pytest.raises(base.UserError, match="its splits are train"):
        open_task(f"datasets:{tmp_path}/saved:test")


def test_parquet_files_and_slices_of_splits_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = {"question": ["a", "b", "c"], "answer": ["#### 1", "#### 2", "#### 3"]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    task = open_task(f"datasets:{tmp_path}/rows.parquet:train[1:]")
    assert task.size == 2
    assert task.row(0) == {"prompt": "b", "answer": 2, "solution": "#### 2"}


def test_a_bad_row_of_a_data_set_is_found_at_opening(tmp_path):
    datasets.Dataset.from_dict({"prompt": ["a", " "]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(base.UserError, match="row 1: the prompt is empty"):
        open_task(f"datasets:{tmp_path}/saved")


# ---- rendering ----


@pytest.mark.parametrize("template_has_bos", [True, False])
@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_the_start_token_is_never_there_twice_nor_forgotten(adds_bos, template_has_bos, chat):
    """A9, A10"""
    template = "{{ bos_token }} " * template_has_bos + TEMPLATE
    tokenizer = make_tokenizer(adds_bos, template)
    prompt = data.render({"prompt": "a b"}, 0, rendering(tokenizer, chat=chat))
    wanted = adds_bos or (chat and template_has_bos)
    body = (USER, 6, 7, BOT) if chat else (6, 7)
    assert prompt.ids == (BOS,) * wanted + body


def test_messages_are_rendered_by_the_template_whatever_chat_says():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    prompt = data.render({"prompt": messages, "answer": 5}, 9, rendering())
    assert prompt.ids == (USER, 6, END, BOT, 7, END, USER, 8, BOT)
    assert prompt.text == "<user> a </s> <bot> b </s> <user> c <bot>"
    assert (prompt.place, prompt.prompt, prompt.columns) == (9, messages, {"answer": 5})


def test_the_system_message_comes_first_unless_the_row_has_its_own():
    chat = rendering(system="d", chat=True)
    assert data.render({"prompt": "a"}, 0, chat).ids == (SYS, 9, END, USER, 6, BOT)
    own = [{"role": "system", "content": "c"}, {"role": "user", "content": "a"}]
    assert data.render({"prompt": own}, 0, chat).ids == (SYS, 8, END, USER, 6, BOT)


def test_a_last_assistant_message_is_continued():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert data.render({"prompt": messages}, 0, rendering()).ids == (USER, 6, END, BOT, 7)


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ("a", {"tokenizer": make_tokenizer(template=None), "chat": True}, "task.chat=False"),
        (
            [{"role": "user", "content": "a"}],
            {"tokenizer": make_tokenizer(template=None)},
            "no chat template.*give text prompts",
        ),
        ("a", {"system": "b"}, "task.chat=True"),
        (" ", {}, "place 4 is empty"),
        ([{"role": "tool", "content": "a"}], {}, "template refuses the prompt at place 4"),
    ],
)
def test_a_prompt_that_cannot_be_rendered_is_answered(prompt, changes, message):
    """A11"""
    if isinstance(prompt, list) and prompt[0]["role"] == "tool":
        changes = {"tokenizer": make_tokenizer(template="{{ raise_exception('no tools') }}")}
    with pytest.raises(base.UserError, match=message):
        data.render({"prompt": prompt}, 4, rendering(**changes))


# ---- length policies and cursors ----


def test_take_goes_on_where_it_stopped():
    """F2"""
    task, how = open_task("addition"), rendering(limit=9)
    whole, end, changed = data.take(task, 0, 6, how)
    first, cursor, _ = data.take(task, 0, 2, how)
    rest, last, _ = data.take(task, cursor, 4, how)
    assert first + rest == whole and (cursor, end, last, changed) == (2, 6, 6, 0)
    assert [prompt.place for prompt in whole] == list(range(6))


def test_a_prompt_at_the_limit_is_kept_and_one_over_is_an_error():
    """A12"""
    task = listed(["a b c", "a b c d"])
    prompts, cursor, changed = data.take(task, 0, 1, rendering(limit=3))
    assert (prompts[0].ids, cursor, changed) == ((6, 7, 8), 1, 0)
    with pytest.raises(base.UserError, match=r"place 1 .* has 4 tokens.*max_prompt_length = 3"):
        data.take(task, 0, 2, rendering(limit=3))


def test_drop_skips_overlong_prompts_and_counts_them():
    """A12"""
    task = listed(["a b c", "a", "a b c d", "b"])
    prompts, cursor, changed = data.take(task, 0, 3, rendering(limit=2, overlong="drop"))
    assert [p.place for p in prompts] == [1, 3, 5] and (cursor, changed) == (6, 3)


def test_drop_gives_up_after_an_epoch_or_a_thousand():
    """A12"""
    how = rendering(limit=1, overlong="drop")
    with pytest.raises(base.UserError, match="3 prompts in a row"):
        data.take(listed(["a b"] * 3), 0, 1, how)
    with pytest.raises(base.UserError, match=r"1000 prompts in a row .* place 999"):
        data.take(data.Task("endless", None, lambda p: {"prompt": "a b"}), 0, 1, how)


def test_an_epoch_that_has_one_short_prompt_is_enough_for_drop():
    task = listed(["a b", "a b", "c"])
    prompts, cursor, changed = data.take(task, 0, 2, rendering(limit=1, overlong="drop"))
    assert [p.place for p in prompts] == [2, 5] and (cursor, changed) == (6, 4)


def test_truncation_keeps_the_last_tokens_and_the_start_token():
    """A12"""
    how = rendering(limit=2, overlong="truncate_left")
    prompts, cursor, changed = data.take(listed(["a b c", "d"]), 0, 2, how)
    assert [p.ids for p in prompts] == [(7, 8), (9,)] and (cursor, changed) == (2, 1)
    assert prompts[0].text == "b c"
    for limit, ids in ((2, (BOS, 8)), (1, (BOS,))):
        with_bos = rendering(make_tokenizer(adds_bos=True), limit=limit, overlong="truncate_left")
        assert data.take(listed(["a b c"]), 0, 1, with_bos)[0][0].ids == ids


@pytest.mark.parametrize(
    ("changes", "message"), [({"overlong": "cut"}, "drop"), ({"limit": 0}, "at least 1")]
)
def test_a_bad_length_policy_is_answered(changes, message):
    with pytest.raises(base.UserError, match=message):
        data.take(listed(["a"]), 0, 1, rendering(**changes))


def test_columns_are_repeated_prompt_by_prompt():
    """B1"""
    prompts = [
        data.Prompt(0, "a", "a", (6,), {"answer": 1}),
        data.Prompt(1, "b", "b", (7,), {"answer": 2, "hint": "h"}),
    ]
    columns = data.repeated_columns(prompts, 2)
    assert columns == {"answer": [1, 1, 2, 2], "hint": [None, None, "h", "h"]}
