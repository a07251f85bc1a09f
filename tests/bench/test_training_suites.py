"""The suites of training: a policy that reads worked solutions, all losses, drafters compared."""

import json

import numpy as np
import pytest

from fastgrpo_jax.bench import __main__ as bench
from fastgrpo_jax.bench import distill, losses, worked
from fastgrpo_jax.models import load, tiny
from fastgrpo_jax.train import data, grpo, rewards, tasks
from tests.bench.test_bench import run


def test_worked_solutions_are_right():
    assert worked.solve("Compute 3 + 4 * 2 - 5 step by step.") == (
        "4 * 2 = 8. 3 + 8 = 11. 11 - 5 = 6. #### 6"
    )
    assert worked.solve("Compute 3 - 4 * 2 * 2 step by step.") == (
        "4 * 2 = 8. 8 * 2 = 16. 3 - 16 = -13. #### -13"
    )
    slips = iter([1, 0, -2])
    assert worked.solve("Compute 3 + 4 * 2 - 5 step by step.", lambda: next(slips)) == (
        "4 * 2 = 9. 3 + 9 = 12. 12 - 5 = 5. #### 5"
    )
    rows = [worked.task(5).row(i) for i in range(500)]
    said = [worked.solve(row["prompt"]) for row in rows]
    assert rewards.exact_number(said, [row["answer"] for row in rows]) == [1.0] * 500
    assert len({row["answer"] for row in rows}) > 50
    assert all(tasks.to_number(row["answer"]) is not None for row in rows)


def test_a_batch_holds_prompts_and_their_solutions():
    tokenizer = tiny.tokenizer()
    stops = load.stop_tokens(tokenizer, [])
    rendering = data.Rendering(tokenizer, "", True, worked.PROMPT, "error")
    prompts, _, _ = data.take(worked.task(0), 0, 200, rendering)
    said = [worked.solve(prompt.prompt) for prompt in prompts]
    batch = worked.batch(prompts, said, tokenizer, stops[0])
    for prompt, row, first, end in zip(prompts, *map(np.asarray, batch[:3])):
        assert tuple(row[:first]) == prompt.ids
        assert tokenizer.decode(row[first:end]) == worked.solve(prompt.prompt) + "<|im_end|>"


def test_reading_solutions_lowers_the_loss(capsys):
    first = worked.train(0, 1)
    model = worked.train(0, 12)
    said = [line for line in capsys.readouterr().err.splitlines() if "loss" in line]
    before, after = (float(line.rsplit(" ", 1)[1]) for line in said)
    assert before == pytest.approx(np.log(100), rel=0.02) and after < before - 0.8
    assert model.config == first.config == worked.shape()
    assert not np.array_equal(model.params["embed"], first.params["embed"])


def test_every_loss_starts_from_the_same_rollout(tmp_path):
    out = tmp_path / "out.json"
    argv = ["losses", "--quick", f"--out={out}", "--compilation_cache=", "--losses=grpo,cispo"]
    assert bench.main(argv) == 0  # so short a run may teach nothing
    rows = json.loads(out.read_text())["rows"]
    assert [(row["loss"], row["seed"]) for row in rows] == [("grpo", 0), ("cispo", 0)]
    assert all(len(row["rewards"]) == 5 for row in rows)
    assert rows[0]["rewards"][0] == rows[1]["rewards"][0]
    assert rows[0]["rise"] == pytest.approx(rows[0]["last"] - rows[0]["first"], abs=1e-4)


def test_a_loss_that_does_not_train_fails_the_suite(tmp_path, monkeypatch, capsys):
    def train(c, workdir):
        rise = {"grpo": 0.1, "dapo": 0.0}.get(c.loss.name, 0.2) * (1 + c.seed)
        return {"loss": c.loss.name, "seed": c.seed, "rise": rise, "rewards": []}

    monkeypatch.setattr(losses, "_train", train)
    monkeypatch.setattr(losses.worked, "train", lambda seed, steps: load.load("tiny"))
    argv = ["losses", f"--out={tmp_path / 'x.json'}", "--compilation_cache="]
    assert bench.main([*argv, "--seeds=3"]) == 1
    assert "does not rise with dapo" in capsys.readouterr().err
    assert bench.main([*argv, "--losses=grpo,gspo", "--seeds=3"]) == 0
    summary = json.loads((tmp_path / "x.json").read_text())["summary"]
    assert summary["rise/gspo"] == pytest.approx(0.4)  # the median of .2, .4 and .6
    assert summary["least/grpo"] == 0.1 and summary["most/grpo"] == pytest.approx(0.3)


def test_drafters_are_compared_over_the_same_seconds(tmp_path):
    options = "--token_loss=ce", "--unroll=1,2", "--optimizer=adamw", "--held=0.5"
    result = run(tmp_path, "distill", "--quick", "--seconds=0.2", *options)
    rows = result["rows"]
    assert [row["unroll"] for row in rows] == ["1", "2"]
    for row in rows:
        assert row["updates"] == max(round(0.2 / row["update_s"]), 2) or row["update_s"] < 0.01
        chances = [row[f"acceptance_{i}"] for i in (1, 2, 3)]
        assert all(0 < chance < 1 for chance in chances)
        a, b, c = chances
        assert row["accepted"] == pytest.approx(a + a * b + a * b * c, abs=1e-3)
    best = max(rows, key=lambda row: row["accepted"])
    assert result["summary"]["best_unroll"] == best["unroll"]


def test_a_chains_accepted_drafts_are_added_up():
    assert distill.accepted([0.5, 0.4, 0.25]) == pytest.approx(0.5 + 0.2 + 0.05)


def test_all_losses_are_tried_by_default():
    import argparse

    parser = argparse.ArgumentParser()
    losses.add_arguments(parser)
    assert parser.parse_args([]).losses.split(",") == list(grpo.LOSSES)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["losses", "--losses=grpo,ppo"], "--losses holds 'ppo'; allowed: grpo"),
        (["losses", "--seeds=0"], "--seeds is 0; allowed: 1 or more"),
        (["distill", "--unroll=x"], "--unroll or a weight holds no number"),
        (["distill", "--optimizer=sgd"], "--optimizer is 'sgd'; allowed: adamw, muon"),
        (["distill", "--token_loss=mse"], "--token_loss is 'mse'; allowed: ce, tv, lk"),
        (["distill", "--seconds=0"], "--seconds is 0.0; allowed: above 0"),
        (["distill", "--held=0"], "--held is 0.0; allowed here: above 0"),
        (["distill", "--lesson=7"], "--lesson is 7; allowed: multiples of --group"),
    ],
)
def test_bad_options_are_answered(argv, message, tmp_path, capsys):
    assert bench.main([*argv, f"--out={tmp_path / 'x'}", "--compilation_cache="]) == 2
    assert message in capsys.readouterr().err
