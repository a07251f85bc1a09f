"""Ratios of current, proximal and behaviour policies, against loops and enumeration."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax.train import grpo, ratios

NAN = float("nan")
LENGTHS, STALENESS = (4, 3, 1, 0), (0, 1, 3, 2)


@pytest.fixture(scope="module")
def example():
    rng = np.random.default_rng(0)
    logps = rng.normal(-2, 0.7, (4, 4))
    return logps, logps + rng.normal(0, 0.5, (4, 4)), np.arange(4) < np.array(LENGTHS)[:, None]


def test_the_proximal_policy_lies_between_behaviour_and_current_by_staleness(example):
    """A-3PO: 0 is the current policy, bit for bit; 1 the behaviour policy; then ever nearer."""
    logps, behaviour, _ = example
    stale = jnp.array(STALENESS, jnp.int32)
    got = ratios.proximal(jnp.asarray(logps), jnp.asarray(behaviour), stale)
    for n, s in enumerate(STALENESS):
        for t in range(4):
            alpha = 1 / s if s else 0
            mixed = alpha * behaviour[n, t] + (1 - alpha) * logps[n, t]
            np.testing.assert_allclose(got[n, t], mixed, rtol=1e-12)
    np.testing.assert_array_equal(got[0], logps[0])
    np.testing.assert_array_equal(ratios.proximal(jnp.asarray(logps)), logps)
    slope = jax.grad(lambda x: ratios.proximal(x, jnp.asarray(behaviour), stale).sum())
    np.testing.assert_array_equal(slope(jnp.asarray(logps)), 0)


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("cap", [0.0, 0.9])
def test_importance_weights_are_truncated_ratios_of_tokens_or_sequences(example, by_sequence, cap):
    logps, behaviour, mask = example
    args = jnp.asarray(logps), jnp.asarray(behaviour), jnp.asarray(mask)
    got = ratios.truncate(ratios.importance(*args, by_sequence), cap)
    if not cap:
        assert got is None
        got = ratios.importance(*args, by_sequence)
    for n, length in enumerate(LENGTHS):
        logs = [logps[n, t] - behaviour[n, t] for t in range(length)]
        for t in range(4):
            ratio = 1.0
            if t < length:
                ratio = math.exp(sum(logs) / length if by_sequence else logs[t])
            np.testing.assert_allclose(got[n, t], min(ratio, cap or ratio), rtol=1e-12)
    if cap:
        assert (np.asarray(got) == 0.9).any()


@pytest.mark.parametrize("by_sequence", [False, True])
def test_importance_weights_have_no_gradient(example, by_sequence):
    logps, behaviour, mask = map(jnp.asarray, example)
    slope = jax.grad(lambda x: ratios.importance(x, behaviour, mask, by_sequence).sum())(logps)
    np.testing.assert_array_equal(slope, 0)


def test_fresh_rows_are_weighed_only_under_a_cap_and_stale_ones_always(example):
    _, _, mask = example
    ratio, stale = jnp.full(mask.shape, 3.0), jnp.array(STALENESS, jnp.int32)
    np.testing.assert_array_equal(ratios.truncate(ratio, 0.0, stale)[:, 0], [1, 3, 3, 3])
    np.testing.assert_array_equal(ratios.truncate(ratio, 2.0, stale)[:, 0], [2] * 4)
    assert ratios.truncate(ratio, 0.0) is None


def losses(example, name, staleness, cap=0.0):
    """Compute (loss, gradient) of one batch as the train step does."""
    logps, behaviour, mask = map(jnp.asarray, example)
    config = grpo.LossConfig(name=name, clip_low=1.0, clip_high=100.0, importance_cap=cap)
    weights = grpo.token_weights(mask, name, 6)
    advantages = jnp.array([1.0, -2.0, 0.5, 3.0])

    def loss(logps):
        old = ratios.proximal(logps, behaviour, staleness)
        ratio = ratios.importance(old, behaviour, mask, config.by_sequence)
        importance = ratios.truncate(ratio, cap, staleness)
        return grpo.policy_loss(logps, old, advantages, weights, config, None, importance)[0]

    return jax.value_and_grad(loss)(logps)


@pytest.mark.parametrize("name", grpo.LOSSES)
@pytest.mark.parametrize("cap", [0.0, 1.1])
def test_rows_of_staleness_zero_have_the_ordinary_loss_exactly(example, name, cap):
    plain = losses(example, name, None, cap)
    for got, expected in zip(losses(example, name, jnp.zeros(4, jnp.int32), cap), plain):
        np.testing.assert_array_equal(got, expected)


def test_a_truncated_weight_scales_the_gradient_of_its_token(example):
    logps, behaviour, mask = example
    plain, capped = (losses(example, "dapo", None, cap)[1] for cap in (0.0, 1.1))
    weights = np.where(mask, np.minimum(np.exp(logps - behaviour), 1.1), 1)
    np.testing.assert_allclose(capped, plain * weights, rtol=1e-7)
    assert (weights == 1.1).any() and (weights < 1).any()


@pytest.mark.parametrize("name", grpo.LOSSES)
@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_what_another_policy_sampled_teaches_the_gradient_of_the_expected_reward(name, staleness):
    """One token of a vocabulary of 5 from another policy, by enumeration, no ratio clipped.

    The ratio's gradient and the importance weight multiply to current / behaviour, whatever the
    proximal policy between them; a fresh row (0) needs a cap to be weighed at all.
    """
    rng = np.random.default_rng(0)
    logits, other, reward = (jnp.asarray(rng.normal(size=5)) for _ in range(3))
    behaviour = jax.nn.log_softmax(other).reshape(5, 1, 1)
    config = grpo.LossConfig(name=name, clip_low=1.0, clip_high=1e6, importance_cap=1e6)
    stale = jnp.full(1, staleness, jnp.int32)

    def loss(logits, i):
        logps = jax.nn.log_softmax(logits)[i].reshape(1, 1)
        old = ratios.proximal(logps, behaviour[i], stale)
        mask = jnp.ones((1, 1), bool)
        ratio = ratios.importance(old, behaviour[i], mask, config.by_sequence)
        weights = grpo.token_weights(mask, name, 1)
        importance = ratios.truncate(ratio, config.importance_cap, stale)
        advantage = reward[i : i + 1]
        return grpo.policy_loss(logps, old, advantage, weights, config, None, importance)[0]

    grads = jnp.stack([jax.grad(loss)(logits, i) for i in range(5)])
    exact = jax.grad(lambda x: jax.nn.softmax(x) @ reward)(logits)
    np.testing.assert_allclose(jax.nn.softmax(other) @ grads, -exact, atol=1e-7)


@pytest.mark.parametrize("by_sequence", [False, True])
def test_nan_outside_the_mask_reaches_neither_ratio_nor_gradient(example, by_sequence):
    """C6"""
    logps, behaviour, mask = map(jnp.asarray, example)
    dirty = [jnp.where(mask, x, bad) for x, bad in ((logps, -jnp.inf), (behaviour, NAN))]

    def total(logps, old):
        return ratios.ratio(logps, old, mask, by_sequence).sum()

    for f in (total, jax.grad(total)):
        np.testing.assert_array_equal(f(*dirty), f(logps, behaviour))


def test_long_sequences_have_bounded_weights():
    """C9: 4,096 tokens with noise of rounding in bfloat16: the product would be e^20 or so."""
    noise = jnp.asarray(np.random.default_rng(0).normal(0.005, 0.02, (8, 4096)))
    mask = jnp.ones(noise.shape, bool)
    got = ratios.importance(noise, jnp.zeros_like(noise), mask, by_sequence=True)
    assert noise.sum(1).max() > 15
    assert np.abs(np.log(got)).max() < 0.01


@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_metrics_are_of_response_tokens_and_of_the_weights_in_use(cap):
    mask = jnp.array([[True, True], [True, False]])
    trainer = jnp.array([[-1.0, -2.0], [-3.0, NAN]])
    behaviour = jnp.array([[-1.5, -2.0], [-2.0, 9.0]])
    ratio = ratios.importance(trainer, behaviour, mask)
    got = ratios.sampling_metrics(trainer, behaviour, ratio, mask, cap)
    used = [min(x, cap or x) for x in (math.exp(0.5), 1.0, math.exp(-1))]
    expected = [0.5, 1, used[2], np.mean(used), used[0]] + ([1 / 3] if cap else [])
    np.testing.assert_allclose(list(got.values()), expected, rtol=1e-6)
    nobody = jnp.zeros_like(mask)
    ones = ratios.importance(trainer, behaviour, nobody)
    got = ratios.sampling_metrics(trainer, behaviour, ones, nobody, cap)
    np.testing.assert_array_equal(list(got.values()), [0, 0, 1, 1, 1] + ([0] if cap else []))
