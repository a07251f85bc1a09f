"""Partial rollouts: groups that are answered over several steps."""

import json

import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.train import carry, data, loop, metrics
from fastgrpo_jax.train import setup as setup_lib
from tests.train import test_loop

SEGMENT = dict(
    rollout__segment=3, sampling__max_response_length=8, model__dtype="float64", steps=6,
    task__prompts_per_step=3, rollout__controller="fixed", rollout__strategy="learned:2:1:3",
    reward__functions="spread.py:spread", drafter__replay_updates=1,
    sampling__stop_tokens=",".join(map(str, range(10, 40))),
)  # fmt: skip


def prompt(place: int, *ids: int) -> data.Prompt:
    fields = dict.fromkeys(data.Prompt._fields)
    return data.Prompt(**{**fields, "ids": ids, "place": place})


def said(starts, news, stopped) -> base.RolloutBatch:
    """Make what a rollout would give: new tokens 100 + place in the row."""
    count, span = len(starts), 12
    tokens = np.zeros((count, span), np.int32)
    length = np.array([len(s) for s in starts])
    for i, start in enumerate(starts):
        tokens[i, : len(start)] = start
        tokens[i, len(start) : len(start) + news[i]] = 100 + np.arange(
            len(start), len(start) + news[i]
        )
    logps = -tokens.astype(np.float32) / 1000
    return base.RolloutBatch(
        tokens, logps, logps * 0, length, length + np.array(news), np.array(stopped)
    )


def test_groups_go_on_until_all_of_their_rows_are_done():
    prompts = [prompt(7, 1, 2), prompt(9, 3)]
    groups = carry.fresh(prompts, 4, 2)
    starts = carry.starts(groups, prompts)
    assert starts == ((1, 2), (1, 2), (3,), (3,)) and not any(carry.done(groups))
    assert carry.caps(groups, 5, 3) == (3, 3, 3, 3)
    batch = said(starts, [3, 2, 1, 3], [False, True, True, False])
    groups = carry.advance(groups, prompts, batch, 5, 9)
    assert carry.done(groups) == (False, True, True, False)
    kept = json.loads(json.dumps(groups))  # as a checkpoint keeps them
    groups = carry.read(kept)
    starts = carry.starts(groups, prompts)
    assert starts == ((1, 2, 102, 103, 104), (1, 2), (3,), (3, 101, 102, 103))
    assert carry.caps(groups, 5, 3) == (2, 3, 3, 2)
    batch = said(starts, [2, 0, 0, 1], [False, False, False, False])
    groups = carry.advance(groups, prompts, batch, 5, 9)
    assert [carry.finished(g) for g in groups] == [True, False]
    assert [row.stopped for row in groups[0].rows] == [False, True]  # at its limit; stopped before
    whole = carry.batch(groups[:1], prompts[:1], 12)
    assert whole.tokens[0].tolist() == [1, 2, 102, 103, 104, 105, 106, 0, 0, 0, 0, 0]
    assert whole.tokens[1, :5].tolist() == [1, 2, 102, 103, 0]
    assert (whole.prompt_length.tolist(), whole.length.tolist()) == ([2, 2], [7, 4])
    np.testing.assert_allclose(whole.logps[0, 2:7], -np.arange(102, 107) / 1000, rtol=1e-6)
    assert not whole.logps[:, :2].any() and whole.stopped.tolist() == [False, True]
    assert carry.ages(groups, 6).tolist() == [2] * 4


def test_a_row_is_done_at_the_longest_sequence_too():
    prompts = [prompt(0, *range(7))]
    groups = carry.fresh(prompts, 0, 1)
    batch = said(carry.starts(groups, prompts), [2], [False])
    assert carry.finished(carry.advance(groups, prompts, batch, 5, 9)[0])
    assert not carry.finished(carry.advance(groups, prompts, batch, 5, 10)[0])


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    """A run whose answers take up to three steps."""
    workdir = tmp_path_factory.mktemp("carried")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workdir)
        spread(workdir)
        loop.train(test_loop.config(**SEGMENT), workdir / "run")
    return workdir


def spread(folder):
    (folder / "spread.py").write_text(
        "def spread(completion_ids):\n    return [sum(ids) % 5 / 5 for ids in completion_ids]\n"
    )


def test_groups_are_trained_on_once_and_none_is_lost(carried):
    rows = metrics.read(carried / "run")
    assert len(rows) == 6
    told = [json.loads(x) for x in (carried / "run" / "completions.jsonl").read_text().splitlines()]
    group = test_loop.config().task.group
    seen = [(row["place"], row["sample"]) for row in told if row["sample"] < group]
    assert len(seen) == len(set(seen))
    assert any(row["partial/carried"] > 0 for row in rows)
    assert any(row["partial/age_mean"] > 0 for row in rows)
    assert max(row["completions/max_length"] for row in rows) == 8 > SEGMENT["rollout__segment"]
    assert any(row["grad_norm"] > 0 for row in rows)
    assert all(row["compile/unexpected"] == 0 for row in rows)


def test_no_strategy_changes_a_token(carried, monkeypatch):
    """Law 1 over steps: cuts are by token count, noise is of each segment's own step."""
    monkeypatch.chdir(carried)
    loop.train(test_loop.config(**SEGMENT | {"rollout__controller": "off"}), carried / "off")
    texts = [(carried / name / "completions.jsonl").read_text() for name in ("run", "off")]
    assert texts[0] == texts[1]


def test_a_run_with_carried_groups_resumes_bit_for_bit(carried, monkeypatch):
    """Law 6: what is carried is in the checkpoint."""
    monkeypatch.chdir(carried)
    for steps in (2, 6):
        c = test_loop.config(**SEGMENT | {"steps": steps})
        loop.train(c, carried / "resumed")
    names = ("run", "resumed")
    texts = [(carried / name / "completions.jsonl").read_text() for name in names]
    assert texts[0] == texts[1]
    test_loop.assert_same(*(test_loop.final_state(c, carried / name) for name in names))
    assert test_loop.timeless(carried / "run") == test_loop.timeless(carried / "resumed")


def test_packed_steps_leave_out_seats_without_an_answer(carried, monkeypatch):
    monkeypatch.chdir(carried)
    loop.train(test_loop.config(**SEGMENT | {"optim__token_budget": 96}), carried / "packed")
    found, wanted = (metrics.read(carried / name) for name in ("packed", "run"))
    for name in ("loss", "grad_norm", "drafter/loss", "entropy"):
        np.testing.assert_allclose(
            [row[name] for row in found], [row[name] for row in wanted], rtol=1e-4, atol=1e-6
        )


def test_dynamic_sampling_is_refused_beside_it():
    with pytest.raises(
        base.UserError, match=r"task.resample_max is 2; allowed: 0 with rollout.seg"
    ):
        setup_lib.prepare(test_loop.config(**SEGMENT | {"task__resample_max": 2}))
