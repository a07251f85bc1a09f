"""Sequences packed into bins teach exactly what they teach in padded rows, in one executable."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.train import distill, grpo, layout, optim, packing, step

V, P, G, LP, R = 31, 3, 3, 6, 5
N, LONGEST, BUDGET = P * G, LP + R, 19
POLICY = base.PolicyConfig(
    vocab=V, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, max_positions=64,
    dtype="float64",
)  # fmt: skip
SHAPES = {kind: eagle.config_for(POLICY, kind) for kind in eagle.KINDS}
SHAPES |= {"three depths": dataclasses.replace(SHAPES["fastgrpo"], taps=(0, 1, 1))}
equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)
close = functools.partial(
    jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
)


def config(kind="fastgrpo", unroll=1, token_loss="ce", **loss):
    return step.StepConfig(
        policy=POLICY,
        eagle=SHAPES[kind],
        loss=grpo.LossConfig(**loss),
        optim=optim.OptimConfig(learning_rate=1e-2),
        drafter_optim=optim.OptimConfig(learning_rate=1e-2),
        distill=distill.DistillConfig(unroll=unroll, token_loss=token_loss),
        max_response=R,
        max_prompt=LP,
        group=G,
        head_chunk=4,
    )


def draw(seed):
    """Draw (prompt lengths, lengths); some prompts of one token, some responses empty or full."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(rng.choice([1, 2, LP - 1, LP], P), G)
    response = rng.choice([0, 1, 2, R], N, p=[0.15, 0.35, 0.25, 0.25])
    response[0] = 2  # so that there is something to learn from
    return prompt.astype(np.int32), (prompt + response).astype(np.int32)


def batch(seed=0, **changes):
    """Make a padded batch; what lies beyond a sequence are other ids, and NaN."""
    prompt, length = draw(seed)
    rng = np.random.default_rng(1000 + seed)
    tokens = rng.integers(0, V, (N, LONGEST)).astype(np.int32)
    for i in range(N):
        tokens[i, : prompt[i]] = tokens[i // G * G, : prompt[i]]
    outside = np.arange(LONGEST) >= length[:, None]
    values = dict(
        tokens=jnp.asarray(tokens),
        prompt_length=jnp.asarray(prompt),
        length=jnp.asarray(length),
        logps=jnp.asarray(np.where(outside, np.nan, rng.normal(-3, 0.3, tokens.shape)), "float32"),
        advantages=jnp.asarray(rng.normal(size=N) * (np.arange(N) >= G), jnp.float32),
        temperature=jnp.asarray(rng.choice([0.0, 0.6, 1.0], N), jnp.float32),
    )
    return layout.StepBatch(**{**values, **changes})


def packed(b, budget=BUDGET):
    lengths = np.asarray(b.prompt_length), np.asarray(b.length)
    return b._replace(packed=packing.pack(*lengths, G, LONGEST, budget))


@functools.cache
def weights(kind):
    made = policy.init(jax.random.key(0), POLICY), eagle.init(jax.random.key(1), SHAPES[kind])
    return jax.tree.map(lambda x: np.asarray(x * 10 if x.ndim > 1 else x, np.float64), made)


def state(c, kind="fastgrpo"):
    made = step.init_state(c, *weights(kind))
    if c.loss.kl_beta:
        made = made._replace(reference=jax.tree.map(lambda x: x * 0.9, made.params))
    return made


gradients = jax.jit(step.gradients, static_argnums=0)


STALE = dict(kept=jnp.arange(N) % 4 != 1, staleness=jnp.arange(N, dtype=jnp.int32) % 3)
CASES = {
    "grpo, KL": ("fastgrpo", dict(kl_beta=0.3), {}),
    "dapo, unrolled": ("fastgrpo", dict(name="dapo", unroll=3), {}),
    "gspo of stale rows": ("eagle", dict(name="gspo", clip_high=0.01, importance_cap=1.5), STALE),
    "cispo, draft vocabulary": (
        "eagle",
        dict(name="cispo", kl_beta=0.1, kl_estimator="k2"),
        dict(draft_ids=jnp.array([1, 2, 3, 5, 8, 13, 21], jnp.int32)),
    ),
    "dr_grpo, three depths": ("three depths", dict(name="dr_grpo", unroll=2, token_loss="lk"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_terms_and_gradients_are_those_of_padded_rows_for_any_lengths(case):
    """C1, A3, A4: prompts shared in a bin and not; groups whose rewards are equal; empty rows."""
    kind, changes, fields = CASES[case]
    c = config(kind, **changes)
    for seed in range(6):
        b = batch(seed, **fields)
        expected = gradients(c, state(c, kind), b)
        assert float(expected[2].drafter_loss) != 0
        close(expected, gradients(c, state(c, kind), packed(b)))


def test_steps_and_their_metrics_are_those_of_padded_rows_in_one_executable():
    """Law 5, D22: lengths and the number of bins vary, the program does not."""
    c = config(kl_beta=0.1, name="gspo")
    ours, theirs = state(c), state(c)
    train, padded_train = step.make_train_step(c), step.make_train_step(c)
    counts = set()
    for seed in range(8):
        b = packed(batch(seed))
        counts.add(int(b.packed.count))
        ours, metrics = train(ours, b)
        theirs, expected = padded_train(theirs, batch(seed))
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
        assert np.isfinite(metrics["loss"]) and metrics["drafter/loss"] > 0
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), ours, theirs)
    assert len(counts) > 2 and max(counts) < b.packed.sequence.shape[0]
    assert train._cache_size() == 1


def test_the_drafters_weights_do_not_reach_the_policy_bitwise():
    """Law 4, E10"""
    c = config()
    train = step.make_train_step(c)
    b = packed(batch())
    expected, _ = train(state(c), b)
    bad = state(c)
    bad = bad._replace(drafter=jax.tree.map(lambda x: x * np.nan, bad.drafter))
    found, metrics = train(bad, b)
    equal((found.params, found.opt_state), (expected.params, expected.opt_state))
    assert (metrics["drafter/skipped"], metrics["policy/skipped"]) == (1, 0)


def test_a_batch_without_responses_changes_nothing():
    """C4: no bin is filled."""
    b = batch()
    b = packed(b._replace(length=b.prompt_length))
    assert int(b.packed.count) == 0
    c = config()
    before = jax.tree.map(np.array, state(c))
    after, metrics = step.make_train_step(c)(state(c), b)
    assert all(np.isfinite(x) for x in metrics.values())
    equal((after.params, after.drafter), (before.params, before.drafter))


def test_a_bin_is_laid_out_as_drawn_by_hand():
    """Two responses of the first prompt, one of the second; the longest sequence has a bin alone."""
    prompt = np.array([2, 2, 1, 1], np.int32)
    length = np.array([4, 3, 8, 3], np.int32)
    got = packing.pack(prompt, length, 2, 9, 9)
    assert got.count == 2 and got.sequence.shape == (4, 9)
    assert got.bin.tolist() == [1, 1, 0, 1]
    assert got.start.tolist() == [0, 2, 0, 3]
    assert got.sequence[1].tolist() == [0, 0, 1, 3, 3, 0, 0, 3, -1]
    assert got.position[1].tolist() == [2, 3, 2, 1, 2, 0, 1, 0, 0]
    assert got.previous[1].tolist() == [6, 0, 6, 7, 3, -1, 5, -1, -1]
    assert (np.asarray(got.sequence[2:]) == -1).all()
    b = layout.StepBatch(
        tokens=jnp.asarray(np.arange(36).reshape(4, 9), jnp.int32),
        prompt_length=jnp.asarray(prompt),
        length=jnp.asarray(length),
        logps=jnp.zeros((4, 9), jnp.float32),
        advantages=jnp.zeros(4, jnp.float32),
        temperature=jnp.ones(4, jnp.float32),
        packed=got,
    )
    rows = layout.packed(b, layout.locate(b, 8, "grpo"), jnp.int32(1), 2)
    assert rows.tokens[0, :8].tolist() == [2, 3, 11, 28, 29, 0, 1, 27]
    assert rows.sequence.tolist() == [[0, 0, 1, 3, 3, -1, -1, -1, -1]]
    assert not rows.mask[0, :8, 8].any()  # the empty place; what it sees itself is of no use
    assert rows.mask[0, :8].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 0],
    ]


@pytest.mark.parametrize("budget", [LONGEST, BUDGET, 2 * LONGEST, 5 * LONGEST + 3])
def test_bins_hold_every_response_once_with_its_prompt_and_are_enough_for_any_lengths(budget):
    for seed in range(200):
        prompt, length = draw(seed)
        if seed % 10 == 0:  # the most that can be
            prompt, length = np.full(N, LP, np.int32), np.full(N, LONGEST, np.int32)
        got = packing.pack(prompt, length, G, LONGEST, budget)
        again = packing.pack(prompt, length, G, LONGEST, budget)
        equal(got, again)
        assert got.sequence.shape == (packing.bins_for(N, LONGEST, budget), budget)
        seen = set()
        for b in range(int(got.count)):
            there = [(int(n), int(i)) for n, i in zip(got.sequence[b], got.position[b]) if n >= 0]
            assert there and len(there) == len(set(there))
            responses = {(n, i) for n, i in there if i >= prompt[n]}
            groups = {n // G for n, _ in responses}
            prompts = sorted((n // G, i) for n, i in there if i < prompt[n])
            assert prompts == [(g, i) for g in sorted(groups) for i in range(prompt[g * G])]
            assert not seen & responses
            seen |= responses
        assert seen == {(n, i) for n in range(N) for i in range(prompt[n], length[n])}
        assert (np.asarray(got.sequence[int(got.count) :]) == -1).all()


def test_the_cost_follows_the_tokens():
    """Short answers to shared prompts fill few of the bins that long ones would need."""
    prompt = np.full(64, 40, np.int32)
    short = packing.pack(prompt, prompt + 6, 8, 128, 128)
    assert (int(short.count), short.sequence.shape[0]) == (8, 64)  # of 40 + 8 * 6 = 88 places
    shorter = packing.pack(prompt, prompt + 2, 8, 128, 128)
    assert int(shorter.count) == 4  # two prompts of 56 places each


def test_a_sequence_beyond_the_budget_is_refused_with_both_numbers():
    prompt, length = draw(0)
    with pytest.raises(base.UserError, match=r"optim\.token_budget is 10; allowed: 11 or more"):
        packing.pack(prompt, length, G, LONGEST, LONGEST - 1)
    length[4] = LONGEST + 1
    with pytest.raises(base.UserError, match="a sequence has 12 tokens; allowed: 11 at most"):
        packing.pack(prompt, length, G, LONGEST, BUDGET)


def test_micro_batches_beside_bins_are_refused():
    c = dataclasses.replace(config(), micro_batches=3)
    with pytest.raises(base.UserError, match="micro_batches is 3; allowed: 1 with"):
        gradients(c, state(c), packed(batch()))
