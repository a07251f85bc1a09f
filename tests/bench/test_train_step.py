"""The train step's suite changes one thing at a time and counts its executables."""

import dataclasses

import numpy as np
import pytest

from fastgrpo_jax.bench import __main__ as bench
from fastgrpo_jax.bench import common, train_step
from tests.bench.test_bench import run


def test_every_saving_is_set_against_the_step_without_it(tmp_path):
    methods = "base,unchunked,keep_all,keep_none,no_drafter,packed"
    result = run(tmp_path, "train_step", "--quick", "--repeats=1", f"--methods={methods}")
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == methods.split(",")
    peak = {name: row["peak_bytes"] for name, row in rows.items()}
    assert all(row["temp_bytes"] < row["peak_bytes"] for row in rows.values())
    assert peak["no_drafter"] < peak["base"] and peak["keep_none"] < peak["unchunked"]
    assert peak["keep_none"] < peak["base"] < peak["keep_all"]
    assert peak["packed"] < peak["base"]
    summary = result["summary"]
    assert summary["executables"] == 1
    assert summary["places"] == 2 * 4 * 24 and 24 <= summary["tokens"] < summary["places"]
    seconds = {name: row["seconds"] for name, row in rows.items()}
    ratio = pytest.approx(peak["keep_none"] / peak["unchunked"], abs=1e-4)
    assert summary["chunked_peak_ratio"] == ratio
    share = pytest.approx(1 - seconds["no_drafter"] / seconds["base"], abs=1e-4)
    assert summary["drafter_share"] == share
    speedup = pytest.approx(rows["packed"]["tok_s"] / rows["base"]["tok_s"], rel=0.02)
    assert summary["packed_speedup"] == speedup
    assert 0 < summary["pack/filled"] <= 1
    assert 0 < summary["chunked_head_ratio"] < 1


def test_a_step_that_takes_too_much_is_compiled_only(tmp_path):
    result = run(tmp_path, "train_step", "--quick", "--methods=base,packed", "--most_bytes=1")
    assert [row["seconds"] for row in result["rows"]] == [None, None]
    assert "packed_speedup" not in result["summary"]
    assert result["summary"]["executables"] == 0


def test_methods_differ_from_the_base_in_one_thing():
    import argparse

    parser = argparse.ArgumentParser()
    train_step.add_arguments(parser)
    args = parser.parse_args(["--vocab=32", "--tokens=24", "--max_prompt=8"])
    args.seed, args.model, args.weights = 0, "tiny", "own"
    made = train_step.methods(args, common.load(args, "float32"))
    own, unchunked = made.pop("base"), made.pop("unchunked")
    assert unchunked.config == dataclasses.replace(made["keep_none"].config, head_chunk=16 * 24)
    for name, method in made.items():
        changed = [
            field.name
            for field in dataclasses.fields(own.config)
            if getattr(method.config, field.name) != getattr(own.config, field.name)
        ]
        changed += [
            field
            for field in own.batch._fields
            if getattr(method.batch, field) is not getattr(own.batch, field)
        ]
        assert len(changed) == (name != "keep_dots"), name
    lengths = np.asarray(own.batch.length - own.batch.prompt_length)
    assert lengths.max() == 24 and np.median(lengths) < 6


def test_an_unknown_method_and_too_long_sequences_are_refused(tmp_path, capsys):
    out = f"--out={tmp_path / 'x.json'}"
    assert bench.main(["train_step", out, "--methods=fast"]) == 2
    assert "--methods holds 'fast'; allowed: base, unchunked" in capsys.readouterr().err
    assert bench.main(["train_step", out, "--tokens=9999"]) == 2
    assert "--max_prompt and --tokens are 10063 together" in capsys.readouterr().err
