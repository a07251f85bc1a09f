"""Laws of reward functions: what is loaded, what they are given, what becomes of their values."""

import functools
import sys

import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.train import rewards, tasks

NAN = np.nan


def reward(fn, name="mine", weight=1.0):
    return rewards.Reward(name, fn, weight)


def run(*functions, completions=("x", "y", "z"), prompts=None, on_error="raise", **columns):
    prompts = prompts or ["p"] * len(completions)
    ids = [[i] for i in range(len(completions))]
    return rewards.score(functions, prompts, list(completions), ids, columns, on_error)


def constant(values):
    return lambda completions: values


# ---- numbers in text ----


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("3 + 4 = 7", "7"),
        ("It costs $1,234.50.", "1234.5"),
        ("1,234,567", "1234567"),
        ("one of 1, 2, 3", "3"),
        ("1,2345", "2345"),
        ("12,34", "34"),
        ("7.0", "7"),
        ("so .5", "0.5"),
        ("75%", "75"),
        ("-3", "-3"),
        ("is -3", "-3"),
        ("x = \u22123", "-3"),
        ("=-3", "-3"),
        ("(-3)", "-3"),
        ("**-3**", "-3"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("5-3", "3"),
        ("5 - 3", "3"),
        ("5 -3", "3"),
        ("(1) -3", "3"),
        ("5 - -3", "-3"),
        ("5\n-3", "-3"),
        ("x-3", "3"),
        ("step-2", "2"),
        ("no number", None),
        ("", None),
        ("- , . $ %", None),
    ],
)
def test_the_last_number_is_read_as_people_write_it(text, number):
    found = tasks.last_number(text)
    assert (found is None) if number is None else (found == tasks.decimal.Decimal(number))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42\nThat took 3 steps.", 42),
        ("####-7", -7),
        ("<answer> 42. </answer> in 3 steps", 42),
        (r"\boxed{1,000} after 3", 1000),
        (r"\boxed{-$50\%} or 3", -50),
        (r"first \boxed{1}, then #### 2 (3)", 2),
        ("<answer>seven</answer> 8", 8),
        (r"\boxed{x} 9", 9),
    ],
)
def test_a_marked_number_comes_before_the_last_one(text, number):
    assert tasks.final_answer(text) == number


def test_long_blanks_do_not_slow_the_search():
    """B15"""
    for text in ("\\boxed{7" + " " * 200_000, "<answer>" + " \n" * 200_000, "5 " + "\t" * 200_000):
        assert tasks.marked_numbers(text) == []
        tasks.last_number(text + "-")


def test_exact_number_compares_values_and_leaves_out_rows_without_an_answer():
    texts = ["so 7", "7.0", "$1,234.", "6", "none", "0", "5 - 3"]
    scores = rewards.exact_number(texts, [7, "7", 1234, 7, 7, None, "3"])
    assert scores == [1.0, 1.0, 1.0, 0.0, 0.0, None, 1.0]
    assert rewards.exact_number(["0.1"], [0.1]) == [1.0]
    with pytest.raises(ValueError, match="'north' is not a number"):
        rewards.exact_number(["7"], ["north"])


def test_model_output_is_never_evaluated(tmp_path):
    """B17"""
    victim = tmp_path / "victim"
    attack = f"__import__('os').mkdir({str(victim)!r}) or 3+4"
    assert rewards.exact_number([attack, "3+4"], [7, 7]) == [0.0, 0.0]
    assert rewards.format_([f"\\boxed{{{attack}}}"]) == [0.0]
    assert not victim.exists()


def test_format_wants_exactly_one_marked_number():
    texts = ["<answer>7</answer>", r"is \boxed{7}", "#### 7", "7", "<answer>x</answer>", ""]
    assert rewards.format_(texts) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert rewards.format_([r"\boxed{7} or \boxed{8}"]) == [0.0]


# ---- loading ----


def test_functions_load_by_name_file_and_module_with_their_weights(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def near(completions): return [0.5 for _ in completions]\n")
    (tmp_path / "reward_pack.py").write_text(
        "def far(completions): return [2 for _ in completions]"
    )
    monkeypatch.syspath_prepend(tmp_path)
    loaded = rewards.load_rewards(f"format, {tmp_path}/mine.py:near,reward_pack:far", "1, 0.5,-2")
    assert [(r.name, r.weight) for r in loaded] == [("format", 1.0), ("near", 0.5), ("far", -2.0)]
    assert run(*loaded, completions=["#### 1", ""]).total.tolist() == [-2.75, -3.75]
    assert [r.weight for r in rewards.load_rewards("format,exact_number", "")] == [1.0, 1.0]
    sys.modules.pop("reward_pack")


@pytest.mark.parametrize(
    ("functions", "weights", "message"),
    [
        ("exact_number,format,m:f", "1,2", "2 numbers .* for 3 functions"),
        ("format", "1,2", "2 numbers .* for 1 functions"),
        ("format", "much", "'much'; it must be a finite number"),
        ("format", "nan", "'nan'"),
        ("exact_numbr", "", "did you mean exact_number"),
        ("", "", "names ''.*exact_number, format"),
        ("format,,exact_number", "", "names ''"),
        ("format,format", "", "format comes twice"),
        ("missing.py:f", "", "no file missing.py"),
        ("no_such_module:f", "", "cannot import 'no_such_module'"),
        ("math:sqroot", "", "math has no 'sqroot' .did you mean sqrt"),
        ("math:pi", "", "must be callable"),
    ],
)
def test_what_cannot_be_loaded_is_answered(functions, weights, message):
    """B12"""
    with pytest.raises(base.UserError, match=message):
        rewards.load_rewards(functions, weights)


def test_a_file_that_fails_to_load_says_why(tmp_path):
    (tmp_path / "bad.py").write_text("import nonsense_module")
    with pytest.raises(base.UserError, match=r"bad.py fails to load: .*nonsense_module"):
        rewards.load_rewards(f"{tmp_path}/bad.py:f", "")


# ---- calling ----


def test_functions_are_given_the_names_they_take():
    """B13"""
    seen = {}

    def few(completions, answer):
        seen["few"] = (completions, answer)
        return [0.0, 0.0]

    def everything(**given):
        seen["everything"] = sorted(given)
        return [0.0, 0.0]

    def tokens(completion_ids, prompts, missing=3):
        seen["tokens"] = (completion_ids, prompts, missing)
        return [0.0, 0.0]

    both = [reward(f, f.__name__) for f in (few, everything, tokens)]
    run(*both, completions=["x", "y"], answer=[1, 2], hint=["a", "b"])
    assert seen["few"] == (["x", "y"], [1, 2])
    assert seen["everything"] == ["answer", "completion_ids", "completions", "hint", "prompts"]
    assert seen["tokens"] == ([[0], [1]], ["p", "p"], 3)


def test_completions_follow_the_shape_of_their_prompts():
    message = [{"role": "user", "content": "a"}]
    seen = []

    def keep(prompts, completions):
        seen.extend(zip(prompts, completions, strict=True))
        return [1, 0]

    run(reward(keep), completions=["x", "y"], prompts=["text", message])
    assert seen == [("text", "x"), (message, [{"role": "assistant", "content": "y"}])]
    built_in = rewards.load_rewards("exact_number", "")
    assert run(*built_in, completions=["7"], prompts=[message], answer=[7]).total.tolist() == [1.0]


def test_a_function_that_changes_its_lists_does_not_reach_the_next():
    def spoil(completions, answer):
        completions.clear()
        answer.reverse()
        return [0.0, 0.0]

    exact = reward(rewards.exact_number, "exact_number")
    scores = run(reward(spoil), exact, completions=["1", "2"], answer=[1, 2])
    assert scores.parts["exact_number"].tolist() == [1.0, 1.0]


def test_async_and_partial_functions_are_called():
    async def later(completions, value):
        return [value for _ in completions]

    assert run(reward(functools.partial(later, value=0.25))).total.tolist() == [0.25] * 3


def test_a_missing_column_names_itself_and_those_there_are():
    exact = reward(rewards.exact_number, "exact_number")
    with pytest.raises(base.UserError, match=r"exact_number needs the column answer.*hint, truth"):
        run(exact, truth=[1, 2, 3], hint=[1, 2, 3], on_error="none")
    with pytest.raises(base.UserError, match="positional-only"):
        rewards.check_columns([reward(lambda completions, /: [])], [])
    rewards.check_columns([exact], ["answer"])


# ---- values ----


def test_none_is_neither_zero_nor_a_value():
    """B9"""
    scores = run(reward(constant([1, None, 0])))
    np.testing.assert_array_equal(scores.total, [1.0, NAN, 0.0])
    np.testing.assert_array_equal(scores.parts["mine"], [1.0, NAN, 0.0])
    assert scores.failures == 0 and scores.total.dtype == np.float64


def test_zero_is_a_value():
    """B11"""
    assert run(reward(constant([0.0, 0, False]))).total.tolist() == [0.0, 0.0, 0.0]


def test_the_sum_is_weighted_over_the_functions_that_gave_a_value():
    """B12"""
    scores = run(
        reward(constant([1, None, None]), "a", 2.0),
        reward(constant([3, 4, None]), "b", -0.5),
        reward(constant([np.float32(0.5), True, None]), "c", 4.0),
    )
    np.testing.assert_array_equal(scores.total, [2.0 - 1.5 + 2.0, -2.0 + 4.0, NAN])
    assert list(scores.parts) == ["a", "b", "c"]
    np.testing.assert_array_equal(scores.parts["b"], [3.0, 4.0, NAN])


def test_arrays_are_lists_too():
    assert run(reward(constant(np.array([1, 2, 3], np.int32)))).total.tolist() == [1.0, 2.0, 3.0]


def broken(completions):
    raise KeyError("answer key")


def test_a_function_that_raises_ends_the_run_or_costs_its_own_values():
    """B16"""
    with pytest.raises(
        base.UserError,
        match=r"mine failed on 3 rows: KeyError: 'answer key' \(test_rewards.py:\d+\)",
    ) as caught:
        run(reward(broken))
    assert isinstance(caught.value.__cause__, KeyError)
    scores = run(reward(broken), reward(constant([1, 0, None]), "other"), on_error="none")
    np.testing.assert_array_equal(scores.total, [1.0, 0.0, NAN])
    np.testing.assert_array_equal(scores.parts["mine"], [NAN, NAN, NAN])
    assert scores.failures == 3


@pytest.mark.parametrize("value", [NAN, np.inf, -np.inf, "0.5", [1], {}, np.array([1.0, 2.0])])
def test_a_value_that_is_no_finite_number_ends_the_run_or_is_lost(value):
    """B16"""
    with pytest.raises(base.UserError, match=r"mine gave .* for row 1"):
        run(reward(constant([1, value, 0])))
    scores = run(reward(constant([1, value, 0])), on_error="none")
    np.testing.assert_array_equal(scores.total, [1.0, NAN, 0.0])
    assert scores.failures == 1


@pytest.mark.parametrize("result", [[1, 2], [1, 2, 3, 4], [], 1.0, None, "abc"])
@pytest.mark.parametrize("on_error", ["raise", "none"])
def test_a_wrong_count_always_ends_the_run(result, on_error):
    with pytest.raises(base.UserError, match=r"mine gave .* for 3 rows"):
        run(reward(constant(result)), on_error=on_error)


def test_an_unknown_policy_is_refused():
    with pytest.raises(base.UserError, match="'skip'; allowed: raise, none"):
        run(reward(constant([1, 1, 1])), on_error="skip")
