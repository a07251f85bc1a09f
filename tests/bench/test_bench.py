"""The benches run from their command line and write the frame that other tools parse."""

import json

import pytest

from fastgrpo_jax.bench import __main__ as bench
from fastgrpo_jax.bench import lossless

FRAME = {"suite", "device", "versions", "model", "seed", "rows", "summary"}


def run(tmp_path, *argv):
    out = tmp_path / "out.json"
    assert bench.main([*argv, f"--out={out}", "--compilation_cache="]) == 0
    result = json.loads(out.read_text())
    assert FRAME <= result.keys()
    return result


def test_lossless_compares_every_token_and_finds_no_difference(tmp_path):
    cases = "--cases=oracle tree,fastgrpo tree of few ids"
    result = run(tmp_path, "lossless", "--quick", cases, "--train_steps=1")
    summary = result["summary"]
    assert summary["mismatched_tokens"] == summary["diverged_rows"] == 0
    assert summary["rollouts"] == 2 * 2 * 8 and summary["strategies"] == 2
    assert summary["tokens"] > 2 * 2 * 8 * 8
    assert summary["distinct_rollouts"] == 2 + 8  # greedy groups are alike, sampled ones differ
    shares = [r["accepted_share"] for r in result["rows"] if r["strategy"] == "oracle tree"]
    assert len(shares) == 2 and min(shares) > 0.2


def test_a_difference_is_counted_and_a_near_tie_is_told_from_a_wrong_token():
    """The bench must be able to fail: change a token and see it counted."""
    import argparse

    import jax
    import numpy as np

    args = argparse.Namespace(
        dtype="float32",
        seed=0,
        prompts=1,
        group=2,
        tokens=6,
        model="tiny",
        train_steps=0,
        weights="own",
    )
    opened = lossless._open(args)
    _, plain = lossless._decode(opened, None, {}, {}, 1.0)
    same = lossless._compare(opened, plain, plain, 1.0)
    assert same["mismatched_tokens"] == same["diverged_rows"] == 0
    other = jax.tree.map(np.copy, plain)
    at = int(plain.prompt_length[0]) + 2
    other.tokens[0, at] = (other.tokens[0, at] + 1) % 90
    wrong = lossless._compare(opened, plain, other, 1.0)
    assert wrong["mismatched_tokens"] == 1 and wrong["diverged_rows"] == 1
    # Were any gap allowed, only the runner-up would pass as a tie, not just any token.
    lossless.GAP["float32"], before = 1e9, lossless.GAP["float32"]
    try:
        found = set()
        for token in range(100):
            other.tokens[0, at] = token
            certified, gap = lossless._near_tie(opened, plain, other, 0, at, 1.0)
            if certified:
                found.add((token, gap))
        assert len(found) == 1 and next(iter(found))[1] > 0
    finally:
        lossless.GAP["float32"] = before


def test_rollout_measures_every_method_against_both_baselines(tmp_path):
    result = run(
        tmp_path, "rollout", "--quick", "--rows=2", "--group=2", "--tokens=8", "--c_peak=16",
        "--methods=plain_nodrop,plain,eagle2_fixed,ngram", "--lengths=natural",
        "--fixed=learned:2:2:4",
    )  # fmt: skip
    methods = [row["method"] for row in result["rows"]]
    assert methods == ["plain_nodrop", "plain", "eagle2_fixed", "ngram"]
    for row in result["rows"]:
        assert {
            "rows",
            "tok_s",
            "ratio_vs_plain",
            "ratio_vs_nodrop",
            "accept_length",
            "spread",
        } <= (row.keys())
        assert row["tok_s"] > 0
    assert result["rows"][1]["ratio_vs_plain"] == 1.0
    assert result["rows"][2]["accept_length"] >= 1.0


def test_adaptive_methods_and_single_strategies_are_measured_with_the_costs_on_request(
    tmp_path, capsys
):
    result = run(
        tmp_path, "rollout", "--quick", "--rows=2", "--group=2", "--tokens=8", "--drafter=none",
        "--methods=plain,goodput,beg_mab,ngram:2:1:3", "--show_costs",
    )  # fmt: skip
    assert [row["method"] for row in result["rows"]][1:] == ["goodput", "beg_mab", "ngram:2:1:3"]
    assert all(row["tok_s"] > 0 for row in result["rows"])
    assert result["rows"][3]["accept_length"] >= 1.0
    err = capsys.readouterr().err
    assert "cost table of cpu" in err and "2 rows: off" in err


def test_an_oracle_drafts_as_well_as_asked_and_has_a_bound(tmp_path):
    result = run(
        tmp_path, "rollout", "--quick", "--rows=2", "--group=2", "--drafter=oracle:0.8",
        "--methods=plain,oracle:2:1:3", "--tokens=16",
    )  # fmt: skip
    row = result["rows"][1]
    assert 1.6 < row["accept_length"] <= 3.0  # 1 + .8 + .64 = 2.44
    assert row["bound_ratio"] == result["rows"][0]["bound_ratio"] >= 1.0


def test_a_drafter_is_trained_saved_and_used(tmp_path, capsys):
    path = tmp_path / "drafter.safetensors"
    options = "--quick", f"--save={path}", "--held=0.5", f"--rollouts={tmp_path / 'kept.npz'}"
    first, result = (run(tmp_path, "drafter", *options) for _ in range(2))
    assert first["rows"][0]["acceptance_1"] == result["rows"][0]["acceptance_1"]  # read, not made
    other = [*options, "--temperatures=0.3", f"--out={tmp_path / 'x'}", "--compilation_cache="]
    assert bench.main(["drafter", "--model=tiny", *other]) == 2  # were not made so
    assert "--temperatures '0.7,1.0' for '0.3'" in capsys.readouterr().err
    assert result["summary"]["rollouts"] == 2 * 8 * 2 and result["rows"][0]["step"] == 8
    result = run(
        tmp_path, "rollout", "--quick", "--rows=2", "--group=2", "--tokens=4",
        f"--drafter={path}", "--methods=plain,learned:1:1:2",
    )  # fmt: skip
    assert result["rows"][1]["accept_length"] >= 1.0


def test_a_repeat_that_compiled_is_played_again(monkeypatch, tmp_path):
    """Other noise may meet other buckets; compiling them must not count as decoding."""
    from fastgrpo_jax.rollout import generate

    played = []

    def rollout(*args, **kwargs):
        done = real(*args, **kwargs)
        played.append(done.compiled)
        return done

    real = generate.rollout
    monkeypatch.setattr(generate, "rollout", rollout)
    argv = ["--quick", "--rows=2", "--group=2", "--tokens=4", "--methods=plain"]
    run(tmp_path, "rollout", *argv)
    assert played[0] > 0  # the first play compiles, so it is played again
    assert len(played) == 1 + 1 + 2 and not any(played[1:])


def test_each_repeat_answers_other_prompts_and_all_methods_the_same(monkeypatch, tmp_path):
    from fastgrpo_jax.rollout import generate

    asked = {}  # by noise: what was asked with it

    def rollout(engine, weights, request, *args, **kwargs):
        asked.setdefault(request.step, []).append((request.prompts, request.places))
        return real(engine, weights, request, *args, **kwargs)

    real = generate.rollout
    monkeypatch.setattr(generate, "rollout", rollout)
    argv = ["--quick", "--rows=2", "--group=2", "--tokens=4", "--methods=plain,ngram:2:1:3"]
    run(tmp_path, "rollout", *argv, "--earlier=3", "--weights=random")
    first, second = asked[1], asked[2]  # the two repeats
    assert len(first) >= 2 and len(second) >= 2
    assert len(set(first)) == len(set(second)) == 1
    assert first[0][0] != second[0][0] and first[0][1] != second[0][1]
    assert {2000, 2001} <= asked.keys()  # two rollouts of two answers, of which three are known


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rollout", "--methods=plain,fast"], "'fast'"),
        (["rollout", "--earlier=-1"], "--earlier is -1; allowed: 0 or more"),
        (["engine", "--quick", "--strategies=learned:2:1:3@1.5"], "without a share"),
        (["rollout", "--repeats=0"], "--repeats is 0; allowed: 1 or more"),
        (["rollout", "--seed=-5"], "--seed is -5; allowed: 0 or more"),
        (["lossless", "--tokens=0"], "--tokens is 0; allowed: 1 or more"),
        (["rollout", "--fixed=junk"], "--fixed: strategy is 'junk'"),
        (["rollout", "--tokens=100000", "--methods=plain"], "positions"),
        (["rollout", "--max_prompt=3", "--methods=plain"], "--max_prompt is 3"),
        (["rollout", "--rows=0"], "allowed: 1,8,32"),
        (["rollout", "--temperature=-1"], "--temperature is -1.0"),
        (["rollout", "--methods=learned:2:1:9"], "drafter:depth:width:nodes"),
        (["rollout", "--drafter=oracle:2"], "--drafter is 'oracle:2'"),
        (["rollout", "--drafter=/no/such.safetensors", "--rows=2"], "cannot read the drafter"),
        (["drafter", "--save=x", "--temperatures=warm"], "--temperatures is 'warm'"),
        (["drafter", "--save=x", "--steps=0"], "--steps is 0; allowed: 1 or more"),
        (["drafter", "--save=x", "--unroll=0"], "--unroll is 0; allowed: 1 to 16"),
        (["drafter", "--save=x", "--learning_rate=nan"], "--learning_rate is nan"),
        (["drafter", "--save=x", "--vocab=-1"], "--vocab is -1; allowed: 0 (all ids) or more"),
        (["drafter", "--save=/"], "--save is '/', a folder"),
        (["drafter", "--save=x", "--quick", "--rollouts=/no/x"], "there is no such folder"),
        (["drafter", "--save=x", "--rollouts=/etc/passwd"], "which holds no rollouts"),
        (["rollout", "--vocab=-3"], "--vocab is -3"),
        (["rollout", "--quick", "--vocab=1", "--rows=2", "--methods=learned:2:2:4"], "2 children"),
        (
            ["rollout", "--quick", "--verify=rejection", "--rows=2", "--methods=learned:2:2:4"],
            "other than whole chains",
        ),
        (["drafter", "--save=x", "--group=3"], "--lesson is 32; allowed: multiples of --group"),
        (["drafter", "--save=x", "--held=1"], "--held is 1.0; allowed: 0 or more, below 1"),
        (["lossless", "--cases=tree"], "allowed: fastgrpo chain"),
        (["rollout", "--model=/no/such.gguf"], "no such file"),
    ],
)
def test_bad_options_have_one_clear_error(tmp_path, capsys, argv, message):
    out = f"--out={tmp_path / 'x.json'}"
    assert bench.main([*argv, out, "--compilation_cache="]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_a_result_that_cannot_be_written_is_refused_before_any_work(capsys):
    assert bench.main(["rollout", "--out=/proc/no/x.json", "--compilation_cache="]) == 2
    assert "--out is '/proc/no/x.json'" in capsys.readouterr().err


def test_an_unknown_suite_lists_the_suites(capsys):
    assert bench.main(["speed"]) == 2
    err = capsys.readouterr().err
    assert "suite is 'speed'; allowed: lossless, rollout, tail, engine, acceptance, drafter" in err
    assert bench.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "suites: lossless, rollout, tail, engine, acceptance, drafter" in out and "'" not in out
