"""Laws of whole runs: resume equals never stopped, signals lose nothing, bad input is answered.

All runs share one compilation cache, so that only the first pays for compiling.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from fastgrpo_jax import base, configs, main
from fastgrpo_jax.models import eagle, eagle_file
from fastgrpo_jax.train import checkpoint, grpo, loop, metrics, optim, play
from fastgrpo_jax.train import setup as setup_lib

CLOCKS = ("timing_s/", "step_time", "rollout/tokens_per_s", "compile/")


def config(**changes):
    c = configs.load("tiny")
    c.compilation_cache = ""
    c.steps = 4
    c.checkpoint.every = 2
    c.task.max_prompt_length = 40
    c.sampling.max_response_length = 8
    c.rollout.row_buckets = "4"
    c.rollout.slot_step = 96
    for path, value in changes.items():
        configs.override(c, path.replace("__", "."), str(value))
    return c


def timeless(workdir) -> list[dict]:
    return [
        {k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in metrics.read(workdir)
    ]


def final_state(c, workdir) -> base.TrainState:
    setup = setup_lib.prepare(c)
    manager = checkpoint.open_manager(workdir, c.checkpoint.keep)
    state, _ = checkpoint.restore(manager, setup_lib.first_state(c, setup))
    manager.close()
    return jax.device_get(state)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight")
    loop.train(config(), workdir)
    return workdir


def test_two_steps_and_two_more_equal_four_bit_for_bit(straight, tmp_path):
    """F1, F2, F3: tokens, losses, weights, moments, drafter and data order."""
    loop.train(config(steps=2), tmp_path)
    assert [row["step"] for row in metrics.read(tmp_path)] == [0, 1]
    loop.train(config(), tmp_path)
    assert timeless(tmp_path) == timeless(straight)
    assert_same(final_state(config(), tmp_path), final_state(config(), straight))
    rows = [
        (w / "completions.jsonl").read_text().splitlines()
        for w in (straight, pathlib.Path(tmp_path))
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("timing", ["frozen", "live"])
def test_an_adaptive_run_resumes_with_what_its_controller_had_seen(tmp_path, timing):
    """Law 6: frozen costs make every figure equal; with live ones tokens and data order are."""
    adaptive = dict(
        rollout__controller="goodput",
        rollout__strategies="learned:2:1:3,ngram:2:1:3",
        rollout__measure_seconds=0,
        rollout__explore=0.5,
        rollout__timing=timing,
    )
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    loop.train(config(**adaptive), whole)
    halves.mkdir()
    shutil.copy(whole / "costs.json", halves)  # as measured by the first start
    loop.train(config(steps=2, **adaptive), halves)
    loop.train(config(**adaptive), halves)
    said = [(w / "completions.jsonl").read_text() for w in (whole, halves)]
    assert said[0] == said[1]
    if timing == "frozen":
        assert timeless(whole) == timeless(halves)
        assert_same(final_state(config(**adaptive), whole), final_state(config(**adaptive), halves))
    assert all(row["compile/unexpected"] == 0 for row in metrics.read(halves))


def test_earlier_answers_to_a_prompt_raise_what_the_ngram_drafter_gets_right(tmp_path):
    """Two prompts again and again, greedily: from the second epoch on the answers are known."""
    rows = [{"prompt": f"{a} + {a} =", "answer": str(2 * a)} for a in (3, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ngrams = dict(
        task__name=tmp_path / "rows.jsonl",
        task__prompts_per_step=2,
        sampling__temperature=0,
        rollout__controller="fixed",
        rollout__strategy="ngram:3:1:4",
        drafter__kind="none",
    )
    whole, halves, alone = (tmp_path / name for name in ("whole", "halves", "alone"))
    loop.train(config(**ngrams), whole)
    loop.train(config(steps=2, **ngrams), halves)
    loop.train(config(**ngrams), halves)
    assert timeless(whole) == timeless(halves)
    assert metrics.read(whole)[-1]["compile/unexpected"] == 0
    loop.train(config(rollout__ngram_earlier=0, **ngrams), alone)
    said = [(w / "completions.jsonl").read_text() for w in (whole, alone)]
    assert said[0] == said[1]
    with_, without = (
        [row["spec/accept_length"] for row in metrics.read(w)] for w in (whole, alone)
    )
    assert with_[0] == without[0]
    assert min(with_[1:]) > max(without) + 0.2


def test_rows_that_wait_for_a_seat_change_nothing_that_is_learned(straight, tmp_path):
    """Eight rows through three seats: the same tokens, rewards and (over a resume) lengths."""
    waiting = dict(rollout__max_rows=3, rollout__row_buckets="1")
    loop.train(config(steps=2, **waiting), tmp_path)
    loop.train(config(**waiting), tmp_path)
    rows = [(w / "completions.jsonl").read_text() for w in (straight, tmp_path)]
    assert rows[0] == rows[1]
    for name in ("reward", "completions/mean_length", "num_tokens"):
        assert [r[name] for r in timeless(tmp_path)] == [r[name] for r in timeless(straight)]
    assert all(row["compile/unexpected"] == 0 for row in metrics.read(tmp_path))


def test_a_run_starts_from_a_drafter_file(tmp_path):
    setup = setup_lib.prepare(config())
    path = tmp_path / "drafter.safetensors"
    drawn = eagle.init(jax.random.key(9), setup.eagle)
    drawn = jax.tree.map(lambda x: np.asarray(x, np.float32), drawn)
    eagle_file.save(path, setup.eagle, drawn)
    c = config(drafter__init=path)
    assert_same(setup_lib.first_state(c, setup_lib.prepare(c)).drafter, drawn)
    with pytest.raises(base.UserError, match=r"drafter\.kind is 'eagle'; allowed: 'fastgrpo'"):
        setup_lib.prepare(config(drafter__init=path, drafter__kind="eagle"))
    with pytest.raises(base.UserError, match=r"drafter\.kind is 'none'"):
        setup_lib.prepare(config(drafter__init=path, drafter__kind="none"))
    narrow = dataclasses.replace(setup.eagle, ffn=24)  # its own affair
    eagle_file.save(path, narrow, eagle.init(jax.random.key(9), narrow))
    assert setup_lib.prepare(c).eagle.ffn == 24
    other = dataclasses.replace(setup.eagle, hidden=32)
    eagle_file.save(path, other, eagle.init(jax.random.key(9), other))
    with pytest.raises(base.UserError, match="a drafter of another model: hidden 32 for 64"):
        setup_lib.prepare(c)
    deep = dataclasses.replace(setup.eagle, taps=(0, 1, 1))
    eagle_file.save(path, deep, eagle.init(jax.random.key(9), deep))
    with pytest.raises(base.UserError, match="the model has 2 layers"):
        setup_lib.prepare(c)
    with pytest.raises(base.UserError, match=r"drafter\.features is 3, but the model has 2 layers"):
        setup_lib.prepare(config(drafter__features=3))
    with pytest.raises(base.UserError, match=r"drafter\.features is 2; allowed: 1, 3"):
        setup_lib.prepare(config(drafter__features=2))
    path.write_bytes(b"nothing")
    with pytest.raises(base.UserError, match="cannot read the drafter"):
        setup_lib.prepare(c)


def test_a_run_writes_every_file_and_the_metrics_of_the_design(straight):
    rows = metrics.read(straight)
    assert len(rows) == 4
    expected = {
        "reward", "reward_std", "frac_reward_zero_std", "rewards/exact_number/mean", "entropy",
        "clip_ratio/region_mean", "completions/mean_length", "completions/clipped_ratio",
        "num_tokens", "step_time", "loss", "grad_norm", "learning_rate", "spec/accept_length",
        "spec/accept_rate_pos_0", "spec/tokens_per_target_step", "spec/live_rows_mean",
        "spec/off_fraction", "drafter/loss", "drafter/grad_norm", "drafter/steps",
        "timing_s/rollout", "timing_s/prefill", "timing_s/decode", "timing_s/reward",
        "timing_s/train", "timing_s/checkpoint", "compile/count", "compile/pool_bytes",
    }  # fmt: skip
    assert expected <= rows[-1].keys()
    assert "kl" not in rows[-1]  # C15
    assert [row["drafter/steps"] for row in rows] == [1, 2, 3, 4]  # E12
    assert rows[-1]["compile/unexpected"] == 0
    assert rows[-1]["compile/pool_bytes"] > 0
    assert rows[-1]["grad_norm"] >= 0
    # Rounding apart, the trainer's log-probs are the rollout's: same weights, same temperature.
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4
    for name in ("config.json", "completions.jsonl", "report.png", "checkpoints"):
        assert (straight / name).exists()
    assert json.loads((straight / "config.json").read_text())["steps"] == 4


def test_a_finished_run_that_is_started_again_says_so_and_changes_nothing(straight, capsys):
    before = (straight / "metrics.jsonl").read_text()
    loop.train(config(), straight)
    assert "all 4 steps are done" in capsys.readouterr().err
    assert (straight / "metrics.jsonl").read_text() == before


def test_another_config_in_the_same_workdir_is_refused_with_the_difference(straight):
    with pytest.raises(base.UserError, match=r"loss\.name: 'grpo' -> 'dapo'"):
        loop.train(config(loss__name="dapo"), straight)
    loop.train(config(log__completions_per_step=1), straight)  # harmless: accepted


def test_the_policy_learns_the_same_with_and_without_speculation(straight, tmp_path):
    """Law 1 seen from outside: plain decoding gives the same rewards and lengths."""
    loop.train(config(rollout__controller="off", steps=2), tmp_path)
    for plain, fast in zip(timeless(tmp_path), timeless(straight)):
        for name in ("reward", "completions/mean_length", "num_tokens"):
            assert plain[name] == fast[name]
        assert plain["spec/tokens_per_target_step"] == 1.0


def test_kl_and_dapo_and_the_other_drafter_and_micro_batches_run(tmp_path):
    c = config(
        steps=2, loss__name="dapo", loss__kl_beta=0.1, drafter__kind="eagle", optim__micro_batches=2
    )
    loop.train(c, tmp_path)
    rows = metrics.read(tmp_path)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)  # C14: the reference is the start
    assert rows[-1]["drafter/steps"] == 2


def test_packed_steps_learn_what_padded_ones_do_and_say_how_full_their_bins_are(tmp_path):
    """Law 1 keeps the first rollout alike; then the weights differ by rounding."""
    both = {"drafter__vocab": 40, "steps": 2}
    for name, budget in (("padded", 0), ("packed", 110)):
        loop.train(config(optim__token_budget=budget, **both), tmp_path / name)
    padded, packed = (metrics.read(tmp_path / name) for name in ("padded", "packed"))
    for name in ("loss", "entropy", "grad_norm", "drafter/loss", "drafter/grad_norm"):
        assert packed[0][name] == pytest.approx(padded[0][name], rel=1e-4, abs=1e-6)
    for row in packed:
        assert row["pack/bins"] >= 1 and 0.3 < row["pack/filled"] <= 1
        assert row["compile/unexpected"] == 0
    assert "pack/bins" not in padded[0]
    for steps in (1, 2):  # law 6, for bins and for the ids that the drafter is taught among
        both["steps"] = steps
        loop.train(config(optim__token_budget=110, **both), tmp_path / "resumed")
    assert timeless(tmp_path / "resumed") == timeless(tmp_path / "packed")


def test_bins_and_micro_batches_together_are_refused():
    with pytest.raises(base.UserError, match=r"micro_batches is 2; allowed: 1 with optim\.token"):
        setup_lib.prepare(config(optim__token_budget=110, optim__micro_batches=2))


@pytest.mark.parametrize(
    "text, expected",
    [("none", "none"), ("False", "none"), ("true", "full"), ("full", "full"), ("dots", "dots")],
)
def test_what_is_made_again_is_chosen_by_name_or_as_a_bool(text, expected):
    assert setup_lib.prepare(config(optim__remat=text)).step.remat == expected


def test_the_drafter_is_taught_among_the_ids_that_it_may_propose(tmp_path, monkeypatch):
    """The ids of a step are those of its rollout."""
    proposed, taught = [], []
    weights, place = play.rollouts.weights, loop.step_lib.place

    def seen(*args):
        made = weights(*args)
        proposed.append(np.asarray(made.draft_ids).tolist())
        return made

    def heard(config, batch):
        taught.append(np.asarray(batch.draft_ids).tolist())
        return place(config, batch)

    monkeypatch.setattr(play.rollouts, "weights", seen)
    monkeypatch.setattr(loop.step_lib, "place", heard)
    loop.train(config(steps=2, drafter__vocab=40), tmp_path)
    assert len(taught) == 2 and taught == proposed[-2:]
    assert taught[0] != taught[1] and {len(ids) for ids in taught} == {40}


EVERYTHING = dict(
    loss__name="gspo", loss__kl_beta=0.1, loss__kl_estimator="k2", loss__reference_sync_every=3,
    loss__importance_cap=2, loss__mask_truncated="true", optim__schedule="cosine",
    optim__warmup_steps=1, optim__decay_steps=6, optim__mu_dtype="bfloat16",
    optim__weight_decay=0.1, reward__overlong_buffer=4, reward__overlong_factor=0.5,
)  # fmt: skip


def test_every_key_of_the_loss_and_the_optimiser_reaches_the_step():
    step = setup_lib.prepare(config(**EVERYTHING, loss__clip_low=0.3, loss__clip_high=0.4)).step
    assert step.loss == grpo.LossConfig(
        name="gspo", clip_low=0.3, clip_high=0.4, kl_beta=0.1, kl_estimator="k2",
        reference_sync_every=3, reference_sync_alpha=0.6, importance_cap=2.0,
        advantage_scale="group",
    )  # fmt: skip
    assert step.optim == optim.OptimConfig(
        learning_rate=1e-3, schedule="cosine", warmup_steps=1, decay_steps=6, weight_decay=0.1,
        mu_dtype="bfloat16",
    )  # fmt: skip


def test_a_run_with_every_option_of_the_loss_and_the_optimiser_resumes_bit_for_bit(tmp_path):
    """Law 6: the reference that follows, the schedule and a bfloat16 moment are in the checkpoint."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    options = dict(EVERYTHING, checkpoint__every=1)
    loop.train(config(**options), whole)
    loop.train(config(**options, steps=2), halves)
    loop.train(config(**options), halves)
    assert timeless(whole) == timeless(halves)
    assert_same(final_state(config(**options), whole), final_state(config(**options), halves))
    rows = metrics.read(whole)
    rates = [1e-3] + [1e-3 * (1 + np.cos(np.pi * n / 5)) / 2 for n in range(3)]
    np.testing.assert_allclose([row["learning_rate"] for row in rows], rates, rtol=1e-5)
    assert all(row["sampling/importance_sampling_ratio/capped"] == 0 for row in rows)
    assert all(row["policy/skipped_total"] == 0 for row in rows)
    assert all(row["compile/unexpected"] == 0 for row in rows)
    assert min(row["rewards/soft_overlong_punishment/mean"] for row in rows) < 0


@pytest.mark.parametrize("stop, some", [("", False), ("S,m", True)])
def test_completions_that_were_cut_are_not_learned_from(tmp_path, stop, some):
    """C4: the loss is the mean over those of two tokens that were not, of which there are few."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(completions):\n    return [i % 2 for i in range(len(completions))]\n"
    )
    options = dict(
        steps=1, sampling__max_response_length=2, loss__mask_truncated="true", sampling__stop_tokens=stop,
        reward__functions=f"{path}:score", log__completions_per_step=8,
    )  # fmt: skip
    loop.train(config(**options), tmp_path / "run")
    lines = (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
    kept = [row["advantage"] for row in map(json.loads, lines) if row["stopped"]]
    row = metrics.read(tmp_path / "run")[0]
    assert row["completions/clipped_ratio"] == 1 - len(kept) / 8 and (0 < len(kept) < 8) == some
    np.testing.assert_allclose(row["loss"], -np.mean(kept) if kept else 0, atol=1e-6)
    assert (row["grad_norm"] > 0) == some and row["drafter/loss"] > 0


def places(workdir):
    """Return the places of the data stream that each step was trained on."""
    rows = map(json.loads, (workdir / "completions.jsonl").read_text().splitlines())
    found = {}
    for row in rows:
        found.setdefault(row["step"], {})[row["place"]] = None
    return [list(steps) for _, steps in sorted(found.items())]


def test_groups_that_teach_nothing_are_replaced_and_a_resumed_run_takes_the_same(tmp_path):
    """Two of three prompts are hopeless; two prompts a step, two more rounds at most.

    Step 0 answers places 0 1 | 2 3, step 1 4 5 | 6 7 | 8 9, and so on: of each the first two
    that teach are trained on, a hopeless one where the rounds did not give enough.
    """
    data = [{"prompt": f"{i} + {i} =", "hope": i % 3 == 0} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(completions, hope):\n    return [h * (i % 2) for i, h in enumerate(hope)]\n"
    )
    options = dict(
        task__name=tmp_path / "rows.jsonl", task__shuffle="false", task__resample_max=2,
        reward__functions=f"{path}:score", log__completions_per_step=8,
    )  # fmt: skip
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    loop.train(config(**options), whole)
    loop.train(config(**options, steps=2), halves)
    loop.train(config(**options), halves)
    cursor, expected, rounds, replaced = 0, [], [], []
    for _ in range(4):
        seen = [cursor, cursor + 1]
        while sum(i % 3 == 0 for i in seen) < 2 and len(seen) < 6:
            seen += [cursor + len(seen), cursor + len(seen) + 1]
        spare = [i for i in seen[2:] if i % 3 == 0]
        step = [i if i % 3 == 0 or not spare else spare.pop(0) for i in seen[:2]]
        expected.append(step)
        rounds.append(len(seen) / 2 - 1)
        replaced.append(sum(i not in seen[:2] for i in step))
        cursor += len(seen)
    assert places(whole) == expected
    rows = metrics.read(whole)
    assert [row["resample/rounds"] for row in rows] == rounds and max(rounds) == 2
    assert [row["resample/replaced"] for row in rows] == replaced
    assert all(row["compile/unexpected"] == 0 for row in rows)
    assert timeless(whole) == timeless(halves)
    assert_same(final_state(config(**options), whole), final_state(config(**options), halves))
    said = [(w / "completions.jsonl").read_text() for w in (whole, halves)]
    assert said[0] == said[1]


def test_a_run_whose_groups_never_differ_ends_all_the_same(tmp_path):
    """B19: so many extra rounds and no more; the policy stays."""
    path = tmp_path / "mine.py"
    path.write_text("def score(completions):\n    return [1.0] * len(completions)\n")
    options = dict(steps=1, task__resample_max=3, reward__functions=f"{path}:score")
    loop.train(config(**options), tmp_path / "run")
    row = metrics.read(tmp_path / "run")[0]
    assert (row["resample/rounds"], row["resample/replaced"]) == (3, 0)
    assert row["frac_reward_zero_std"] == 1 and row["grad_norm"] == 0
    assert places(tmp_path / "run")[0][0] == 0


def test_a_run_without_a_drafter_uses_ngrams_and_counts_no_drafter_steps(tmp_path):
    loop.train(config(steps=1, drafter__kind="none"), tmp_path)
    row = metrics.read(tmp_path)[0]
    assert row["drafter/steps"] == 0
    assert "drafter/loss" not in row
    assert row["spec/off_fraction"] < 1


def spawn(workdir, *more):
    code = "import sys; from fastgrpo_jax import main; sys.exit(main.main(sys.argv[1:]))"
    arguments = [
        "--config=tiny", f"--workdir={workdir}", "--config.compilation_cache=",
        "--config.task.max_prompt_length=40", "--config.sampling.max_response_length=8",
        "--config.rollout.row_buckets=4", "--config.rollout.slot_step=96", *more,
    ]  # fmt: skip
    cache = str(jax.config.jax_compilation_cache_dir)
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_finished_steps_and_says_how_to_resume(tmp_path, number):
    process = spawn(tmp_path, "--config.steps=100000", "--config.checkpoint.every=100000")
    deadline = time.monotonic() + 240
    path = tmp_path / "metrics.jsonl"
    while not (path.exists() and path.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"{number.name}: saving soon" in err
    assert "To resume:" in err and "Traceback" not in err
    done = len(metrics.read(tmp_path))
    manager = checkpoint.open_manager(tmp_path, 2)
    assert manager.latest_step() == done
    manager.close()


def answer(capsys, *argv):
    code = main.main(list(argv))
    err = capsys.readouterr().err
    assert code == 2 and "\nerror: " in "\n" + err and "Traceback" not in err, err
    return err[err.index("error: ") :].strip()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.model.name=/no/such.gguf", "there is no such file"),
        ("--config.model.name=/", "model.name is '/': that directory has no config.json"),
        (
            "--config.loss.name=ppo",
            "loss.name is 'ppo'; allowed: grpo, bnpo, dapo, dr_grpo, gspo, cispo",
        ),
        ("--config.task.group=1", "task.group is 1; allowed: 2 or more"),
        ("--config.optim.micro_batches=3", "optim.micro_batches is 3; allowed: divisors of 8"),
        ("--config.optim.remat=some", "optim.remat is 'some'; allowed: none, full, dots, or false"),
        ("--config.optim.token_budget=9", "optim.token_budget is 9; allowed: 0 (off), or "),
        ("--config.optim.token_budget=99999", "token_budget is 99999; allowed: 0 (off), or "),
        ("--config.task.max_prompt_length=5", "task.max_prompt_length = 5"),
        ("--config.task.name=/no/such.jsonl", "No such file"),
        ("--config.reward.functions=exact_numbr", "exact_number"),
        ("--config.rollout.strategy=learned:2:1:9", "nodes must lie in"),
        ("--config.rollout.controller=fast", "allowed: off, fixed, fastgrpo, beg_mab, goodput"),
        ("--config.rollout.strategies=oracle:2:1:3", "the oracle is for benches only"),
        ("--config.rollout.verify=coin", "rollout.verify is 'coin'; allowed: draws, rejection"),
        ("--config.drafter.token_loss=kl", "drafter.token_loss is 'kl'; allowed: ce, tv, lk"),
        ("--config.drafter.unroll=0", "drafter.unroll is 0; allowed: 1 to 16"),
        (
            "--config.rollout.strategies=off,learned:2",
            "rollout.strategies: strategy is 'learned:2'",
        ),
        ("--config.rollout.timing=warm", "rollout.timing is 'warm'; allowed: live, frozen"),
        ("--config.rollout.explore=1", "rollout.explore is 1.0; allowed: 0 or more, below 1"),
        ("--config.seed=9223372036854775807", "seed is 9223372036854775807; allowed: 2147483646"),
        ("--config.optim.warmup_steps=99999999999", "optim.warmup_steps is 99999999999; allowed"),
        ("--config.rollout.ngram_max=1000", "rollout.ngram_max is 1000; allowed: 32 at most"),
        ("--config.foo=1", "there is no key foo; all keys are in"),
        ("--config.sampling.top_p=0", "sampling.top_p is 0.0; allowed: above 0"),
        ("--config.sampling.temperature=nan", "sampling.temperature is nan"),
        ("--config.sampling.stop_tokens=xyz", "exactly one token"),
        ("--config.rollout.row_buckets=4,x", "rollout.row_buckets is '4,x'"),
        ("--config.model.dtype=int8", "allowed: float32"),
        ("--config.sampling.max_length=10", "sampling.max_length is 10"),
        ("--config.drafter.learning_rate=-1", "drafter.learning_rate is -1.0"),
        ("--config.loss.head_chunk=0", "loss.head_chunk is 0"),
        ("--config.task.resample_max=-1", "task.resample_max is -1; allowed: 0 or more"),
        (
            "--config.reward.overlong_buffer=17",
            "reward.overlong_buffer is 17; allowed: 0 (off) to 16",
        ),
        (
            "--config.reward.overlong_factor=nan",
            "reward.overlong_factor is nan; allowed: 0 or more",
        ),
        ("--config.loss.kl_estimator=k9", "loss.kl_estimator is 'k9'; allowed: k1, k2, k3"),
        ("--config.loss.importance_cap=0.1", "loss.importance_cap is 0.1; allowed: 0 (off), or 1"),
        ("--config.loss.reference_sync_every=5", "loss.reference_sync_every is 5; allowed: 0"),
        ("--config.optim.schedule=linear", "optim.decay_steps is 0; allowed: above optim.warmup"),
        ("--config.optim.mu_dtype=float16", "optim.mu_dtype is 'float16'; allowed: bfloat16"),
        ("--config.task.name=datasets:", "datasets:NAME"),
        ("--config.sampling.stop_tokens=99999999", "the id 99999999; allowed: below 100"),
        ("--config.drafter.kind=medusa", "allowed: fastgrpo, eagle, none"),
        ("--config.rolout.n_max=3", "did you mean rollout.n_max?"),
    ],
)
def test_bad_input_has_one_clear_error_before_any_work(capsys, tmp_path, flag, message):
    extra = ["--config.rollout.controller=fixed"] if "strategy" in flag else []
    workdir = tmp_path / "run"
    err = answer(capsys, "--config=tiny", f"--workdir={workdir}", *extra, flag)
    assert message in err
    assert not (workdir / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rollout__segment=8), "rollout.segment is 8; allowed: 0 (off), or below"),
        (dict(drafter__replay_updates=2, drafter__kind="none"), "replay_updates is 2; allowed: 0"),
        (dict(drafter__replay_updates=2, drafter__train=False), "replay_updates is 2; allowed: 0"),
        (dict(optim__freeze=True, lora__rank=2), "lora.rank is 2; allowed: 0 with optim.freeze"),
        (dict(optim__freeze=True, loss__kl_beta=0.1), "kl_beta is 0.1; allowed: 0 with optim.fr"),
    ],
)
def test_what_would_do_nothing_is_refused(changes, message):
    with pytest.raises(base.UserError, match=re.escape(message)):
        setup_lib.prepare(config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(drafter__vocab=1), "drafter.vocab is 1, but learned:2:2:4 drafts 2 children"),
        (dict(rollout__verify="rejection"), "may choose learned:2:2:4, which is no whole chain"),
        (dict(rollout__verify="rejection", rollout__draft_noise="off"), "draft_noise is 'off'"),
    ],
)
def test_settings_that_no_strategy_can_follow_are_refused_at_start(tmp_path, changes, message):
    fixed = dict(rollout__controller="fixed", rollout__strategy="learned:2:2:4")
    with pytest.raises(base.UserError, match=message):
        loop.train(config(**fixed, **changes), tmp_path)


def test_a_run_may_verify_by_rejection_and_unroll_its_drafter(tmp_path):
    changes = dict(
        rollout__controller="fixed", rollout__strategy="learned:2:1:3", rollout__verify="rejection",
        drafter__unroll=2, drafter__token_loss="lk", steps=2,
    )  # fmt: skip
    loop.train(config(**changes), tmp_path)
    last = metrics.read(tmp_path)[-1]
    assert last["drafter/steps"] == 2 and 0 < last["drafter/acceptance"] < 1
    assert last["spec/accept_length"] >= 1


def test_a_file_in_the_place_of_the_checkpoints_is_refused_at_start(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(base.UserError, match="checkpoints cannot be a folder"):
        loop.train(config(), tmp_path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('boom')", "failed on 8 rows: ValueError: boom"),
        ("raise SystemExit(3)", "failed on 8 rows: SystemExit: 3"),
        ("return [1.0]", "gave 1 values for 8 rows"),
        ("return [float('nan')] * len(completions)", "gave nan for row 0"),
    ],
)
def test_a_reward_that_misbehaves_ends_the_run_with_its_name(capsys, tmp_path, body, message):
    """B16 and its kin."""
    path = tmp_path / "mine.py"
    path.write_text(f"def score(completions, answer):\n    {body}\n")
    with pytest.raises(base.UserError, match="score") as caught:
        loop.train(config(reward__functions=f"{path}:score"), tmp_path / "run")
    assert message in str(caught.value)


LATE = """
calls = []
def score(completions):
    calls.append(1)
    if len(calls) == 4:
        raise ConnectionError("the judge is gone")
    return [float(i % 2) for i in range(len(completions))]
"""


def test_an_error_in_mid_run_loses_no_finished_step_and_may_be_mended(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(LATE)
    options = dict(checkpoint__every=100, reward__functions=f"{path}:score")
    with pytest.raises(base.UserError, match="ConnectionError: the judge is gone"):
        loop.train(config(**options), tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run") == [3]
    loop.train(config(**options, reward__on_error="none"), tmp_path / "run")
    assert [row["step"] for row in metrics.read(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_mistake_at_the_first_step_does_not_block_the_workdir(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def score(completions):\n    raise ValueError\n")
    with pytest.raises(base.UserError, match="ValueError"):
        loop.train(config(reward__functions=f"{path}:score"), tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run") == []
    loop.train(config(steps=1), tmp_path / "run")


def test_a_policy_that_is_destroyed_ends_the_run(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(completions):\n    return [i % 2 for i in range(len(completions))]\n"
    )
    c = config(steps=20, optim__learning_rate=1e20, reward__functions=f"{path}:score")
    with pytest.raises(base.UserError, match=r"last 10 updates were not finite.*than 1e\+20"):
        loop.train(c, tmp_path / "run")
    assert "this update was not finite" in capsys.readouterr().err


def test_data_or_rewards_that_changed_since_the_checkpoint_are_noticed(tmp_path, capsys):
    rows, mine = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    rows.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    mine.write_text("def score(completions):\n    return [0.0] * len(completions)\n")
    options = dict(task__name=rows, reward__functions=f"{mine}:score")
    loop.train(config(steps=1, **options), tmp_path / "run")
    loop.train(config(steps=2, **options), tmp_path / "run")
    assert "have changed" not in capsys.readouterr().err
    mine.write_text("def score(completions):\n    return [1.0] * len(completions)\n")
    loop.train(config(steps=3, **options), tmp_path / "run")
    assert "have changed since the checkpoint" in capsys.readouterr().err
    rows.write_text('{"prompt": "one"}\n{"prompt": "three"}\n')
    loop.train(config(steps=4, **options), tmp_path / "run")
    assert "have changed since the checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "two", "answer": "forty"}', "place 3 of .* the answer 'forty', which is no"),
        ('{"prompt": "' + "long " * 40 + '", "answer": 1}', "prompt at place 3 .* tokens, over"),
    ],
)
def test_a_bad_row_is_found_at_start_wherever_it_is(tmp_path, row, message):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "one", "answer": 1}\n' * 3 + row + "\n")
    with pytest.raises(base.UserError, match=message):
        setup_lib.prepare(config(task__name=rows, task__shuffle="false"))


def test_a_start_that_is_interrupted_says_so_without_a_traceback(tmp_path, capsys, monkeypatch):
    def stopped(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(loop, "train", stopped)
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = main.main(["--config=tiny", f"--workdir={tmp_path}", "--config.compilation_cache="])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in capsys.readouterr().err


def test_lost_lines_and_a_lost_config_are_noticed_on_resume(tmp_path, capsys):
    loop.train(config(steps=2), tmp_path)
    (tmp_path / "config.json").unlink()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    loop.train(config(steps=3), tmp_path)
    err = capsys.readouterr().err
    assert "config.json is missing" in err and "metrics.jsonl lacks 1 of the steps" in err
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(base.UserError, match=r"config\.json is no config"):
        loop.train(config(steps=4), tmp_path)


def test_none_rewards_teach_nothing_and_do_not_stop_the_run(tmp_path):
    """B9 at the level of a run."""
    path = tmp_path / "mine.py"
    path.write_text("def score(completions):\n    return [None] * len(completions)\n")
    loop.train(config(steps=1, reward__functions=f"{path}:score"), tmp_path / "run")
    row = metrics.read(tmp_path / "run")[0]
    assert row["reward"] is None
    assert row["grad_norm"] == 0.0


def test_a_run_that_cannot_learn_is_warned_of(capsys, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def score(completions):\n    return [0.5] * len(completions)\n")
    c = config(sampling__temperature=0, reward__functions=f"{path}:score")
    loop.train(c, tmp_path / "run")
    err = capsys.readouterr().err
    assert "warning: sampling.temperature is 0" in err
    assert "for 3 steps no group had rewards that differ" in err
    assert "the last reward is 0.500" in err


def test_an_unreadable_data_row_is_named_by_file_and_line(capsys, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "What is 1 + 1?", "answer": 2}\n{"prompt": \n')
    err = answer(
        capsys, "--config=tiny", f"--workdir={tmp_path / 'run'}", f"--config.task.name={path}"
    )
    assert "rows.jsonl" in err and "2" in err


def test_half_a_surrogate_pair_in_a_prompt_is_named_by_line(capsys, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": "bad \\ud800 one"}\n')
    err = answer(
        capsys, "--config=tiny", f"--workdir={tmp_path / 'run'}", f"--config.task.name={path}"
    )
    assert "line 2" in err and "no Unicode text" in err


def test_a_workdir_that_cannot_be_is_refused_before_the_model_is_loaded(capsys, tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    assert main.main(["--config=tiny", f"--workdir={path}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --workdir is") and "loading" not in err


def test_a_checkpoint_that_lost_a_file_is_answered_once(tmp_path, capfd):
    loop.train(config(steps=1), tmp_path)
    for path in (tmp_path / "checkpoints" / "1" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(base.UserError, match=r"checkpoint 1 in .* \(\S.*\); use another .* anew"):
        loop.train(config(), tmp_path)
    assert "ERROR" not in capfd.readouterr().err


def test_a_checkpoint_that_keeps_other_things_is_refused(tmp_path, straight):
    """As one of another version of the package does: told, not a traceback."""
    shutil.copytree(straight, tmp_path / "run")
    found = list((tmp_path / "run" / "checkpoints").rglob("extra/metadata"))
    for path in found:
        path.write_text(json.dumps({**json.loads(path.read_text()), "novelty": 1}))
    assert found
    with pytest.raises(base.UserError, match=r"of another version.*novelty"):
        loop.train(config(steps=6), tmp_path / "run")


def test_a_checkpoint_of_another_model_is_refused(tmp_path, straight):
    other = config(drafter__kind="none")
    manager = checkpoint.open_manager(straight, 2)
    with pytest.raises(base.UserError, match="cannot be restored"):
        checkpoint.restore(manager, setup_lib.first_state(other, setup_lib.prepare(other)))
    manager.close()
