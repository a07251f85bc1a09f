import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.train import grpo

NAN = float("nan")


def rewards(*groups):
    return np.array(groups, np.float64)


def mask_of(*lengths, places=5):
    return jnp.arange(places) < jnp.array(lengths)[:, None]


def test_each_scale_gives_the_numbers_computed_by_hand():
    """B3, B8: group std 1 and 2, batch std of 1 2 3 10 12 14 by the pocket calculator."""
    r = rewards([1, 2, 3], [10, 12, 14])
    close = dict(rtol=1e-6)
    group = np.array([[-1, 0, 1], [-2, 0, 2]]) / (np.array([[1.0], [2.0]]) + 1e-4)
    np.testing.assert_allclose(grpo.advantages(r, "group"), group, **close)
    np.testing.assert_allclose(grpo.advantages(r, "none"), [[-1, 0, 1], [-2, 0, 2]], **close)
    std = np.sqrt((36 + 25 + 16 + 9 + 25 + 49) / 5)  # mean 7
    batch = np.array([[-1, 0, 1], [-2, 0, 2]]) / (std + 1e-4)
    np.testing.assert_allclose(grpo.advantages(r, "batch"), batch, **close)
    assert grpo.advantages(r, "group").dtype == np.float32


@pytest.mark.parametrize("scale", grpo.SCALES)
@pytest.mark.parametrize("reward", [0.1, 0.0, 1 / 3, -7e9])
def test_equal_rewards_give_exactly_zero(scale, reward):
    """B1, B5: also beside a group with another constant."""
    r = np.stack([np.full(7, reward), np.full(7, 0.7)])
    np.testing.assert_array_equal(grpo.advantages(r, scale), 0)
    np.testing.assert_array_equal(grpo.group_std(r), 0)


def test_a_large_offset_does_not_drown_the_variance():
    r = rewards([1e8 + 1, 1e8 + 2, 1e8 + 3])
    np.testing.assert_allclose(grpo.advantages(r, "group"), [[-1 / 1.0001, 0, 1 / 1.0001]], 1e-6)


def test_rows_without_a_score_are_outside_the_baseline_and_get_zero():
    """B9"""
    r = rewards([1, NAN, 0, NAN], [3, NAN, NAN, NAN], [NAN] * 4)
    a = 0.5 / (np.sqrt(0.5) + 1e-4)
    np.testing.assert_allclose(
        grpo.advantages(r, "group"), [[a, 0, -a, 0], [0] * 4, [0] * 4], rtol=1e-6
    )
    b = 0.5 / (np.std([1, 0, 3], ddof=1) + 1e-4)
    np.testing.assert_allclose(
        grpo.advantages(r, "batch"), [[b, 0, -b, 0], [0] * 4, [0] * 4], rtol=1e-6
    )


def test_a_reward_of_zero_is_a_score():
    """B11"""
    np.testing.assert_allclose(
        grpo.advantages(rewards([0, 0, 0, 1]), "none"), [[-0.25] * 3 + [0.75]]
    )


def test_a_group_of_one_is_refused():
    """B4"""
    with pytest.raises(base.UserError, match=r"task.group is 1; allowed: 2 or more"):
        grpo.advantages(rewards([1.0], [2.0]), "group")


def test_an_infinite_reward_is_refused():
    with pytest.raises(base.UserError, match="-inf"):
        grpo.advantages(rewards([1, -np.inf]), "group")


@pytest.mark.parametrize(
    "changes, text",
    [
        (dict(name="ppo"), "name is 'ppo'; allowed: grpo, bnpo, dapo, dr_grpo, gspo, cispo"),
        (dict(advantage_scale="std"), "advantage_scale is 'std'; allowed: group, batch, none"),
        (dict(clip_low=1.5), "clip_low is 1.5; allowed: [0, 1]"),
        (dict(clip_high=-0.1), "clip_high is -0.1"),
        (dict(kl_beta=NAN), "kl_beta is nan"),
        (dict(kl_estimator="k4"), "kl_estimator is 'k4'; allowed: k1, k2, k3"),
        (dict(importance_cap=0.5), "importance_cap is 0.5; allowed: 0 (off), or 1 or more"),
        (dict(reference_sync_every=8), "reference_sync_every is 8; allowed: 0 (never) or more, and 0"),
        (dict(kl_beta=1.0, reference_sync_every=-1), "reference_sync_every is -1"),
        (dict(reference_sync_alpha=0.0), "reference_sync_alpha is 0.0; allowed: (0, 1]"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_is_allowed(changes, text):
    with pytest.raises(base.UserError, match=re.escape("loss." + text)):
        grpo.LossConfig(**changes)


def test_weights_are_sequence_means_or_token_means_or_of_a_constant_length():
    """C3, C4: lengths 1, 4 and an empty row, which counts in none of them."""
    mask = mask_of(1, 4, 0, places=4)
    expected = {
        "grpo": [[1 / 2, 0, 0, 0], [1 / 8] * 4, [0] * 4],
        "dapo": [[1 / 5, 0, 0, 0], [1 / 5] * 4, [0] * 4],
        "dr_grpo": [[1 / 20, 0, 0, 0], [1 / 20] * 4, [0] * 4],
    }
    expected |= {"gspo": expected["grpo"], "bnpo": expected["dapo"], "cispo": expected["dapo"]}
    assert set(expected) == set(grpo.LOSSES)
    for name, weights in expected.items():
        np.testing.assert_allclose(grpo.token_weights(mask, name, 10), weights, rtol=1e-7)
        np.testing.assert_array_equal(grpo.token_weights(jnp.zeros((2, 3), bool), name, 10), 0)


MOST = 7  # max_response, above every length of the example


def longhand(x, config, importance=None):
    """Return the loss and its gradient by the papers' formulas, row by row, token by token."""
    rows, grads = [], np.zeros(x["logps"].shape)
    for n in range(len(x["mask"])):
        tokens = [t for t in range(x["mask"].shape[1]) if x["mask"][n, t]]
        if not tokens:
            continue
        advantage, row = x["advantages"][n], []
        logs = {t: x["logps"][n, t] - x["old"][n, t] for t in tokens}
        for t in tokens:
            log = sum(logs.values()) / len(tokens) if config.name == "gspo" else logs[t]
            ratio, weight = math.exp(log), 1.0 if importance is None else importance[n, t]
            pull = weight  # gspo: a token moves the ratio of the others' terms too
            if config.name == "gspo" and importance is not None:
                pull = sum(importance[n, u] for u in tokens) / len(tokens)
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            if config.name == "cispo":
                value, slope = -clipped * advantage * x["logps"][n, t], -clipped * advantage
            else:
                value = -min(ratio * advantage, clipped * advantage)
                slope = -ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
            d = x["logps"][n, t] - x["reference"][n, t]
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}[config.kl_estimator]
            kl_slope = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[config.kl_estimator]
            row.append(weight * value + config.kl_beta * kl)
            grads[n, t] = pull * slope + config.kl_beta * kl_slope
        rows.append((n, row))
    tokens = [value for _, row in rows for value in row]
    if config.name in ("grpo", "gspo"):
        for n, row in rows:
            grads[n] /= len(row) * len(rows)
        return sum(sum(row) / len(row) for _, row in rows) / len(rows), grads
    count = len(rows) * MOST if config.name == "dr_grpo" else len(tokens)
    return sum(tokens) / count, grads / count


@pytest.fixture(scope="module")
def example():
    """Lengths 5, 4, 1, 0 and a hole in row 1, as a mask by rows or by tokens may have."""
    rng = np.random.default_rng(0)
    old = rng.normal(-2, 0.5, (4, 5))
    mask = np.array(mask_of(5, 4, 1, 0))
    mask[1, 1] = False
    return dict(
        logps=old + rng.normal(0, 0.4, (4, 5)),
        old=old,
        advantages=np.array([1.5, -0.7, 0.3, 0.9]),
        mask=mask,
        reference=old + rng.normal(0, 0.4, (4, 5)),
    )


@functools.partial(jax.jit, static_argnames="config")
def loss_of(logps, old, advantages, mask, config, reference=None, importance=None):
    weights = grpo.token_weights(mask, config.name, MOST)
    value, terms = grpo.policy_loss(logps, old, advantages, weights, config, reference, importance)
    return value, terms


def gradient_of(logps, **rest):
    return jax.grad(lambda logps: loss_of(logps, **rest)[0])(logps)


def arrays(example, **changes):
    return {k: jnp.asarray(v) for k, v in {**example, **changes}.items()}


@pytest.mark.parametrize("name", grpo.LOSSES)
@pytest.mark.parametrize("estimator", ["", "k1", "k2", "k3"])
@pytest.mark.parametrize("weighed", [False, True])
def test_losses_and_gradients_are_those_of_the_papers(name, estimator, weighed, example):
    """C1, C3, C4; without an estimator there is no reference and no beta."""
    beta = dict(kl_beta=0.3, kl_estimator=estimator) if estimator else {}
    config = grpo.LossConfig(name=name, clip_low=0.1, clip_high=0.3, **beta)
    importance = np.random.default_rng(1).uniform(0.2, 2, (4, 5)) if weighed else None
    value, grads = longhand(example, config, importance)
    x = arrays(example)
    if weighed:
        x["importance"] = jnp.asarray(importance)
    if not estimator:
        del x["reference"]
    loss, terms = loss_of(**x, config=config)
    np.testing.assert_allclose(loss, value, rtol=2e-7)
    np.testing.assert_allclose(gradient_of(**x, config=config), grads, rtol=2e-7, atol=1e-12)
    assert (terms.kl is None) == (not estimator)
    if estimator in ("k2", "k3"):
        assert (np.asarray(terms.kl) >= 0).all()


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_what_is_clipped_is_told(name, example):
    config = grpo.LossConfig(name=name, clip_low=0.1, clip_high=0.3)
    _, terms = loss_of(**arrays(example), config=config)
    log = np.where(example["mask"], example["logps"] - example["old"], 0)
    if name == "gspo":
        log = log.sum(1, keepdims=True) / np.maximum(example["mask"].sum(1, keepdims=True), 1)
    ratio = np.exp(log)
    positive = (example["advantages"] > 0)[:, None]
    high = example["mask"] & (positive | (name == "cispo")) & (ratio > 1.3)
    low = example["mask"] & (~positive | (name == "cispo")) & (ratio < 0.9)
    assert high.any() or low.any()
    np.testing.assert_array_equal(terms.clipped_high, high)
    np.testing.assert_array_equal(terms.clipped_low, low)
    metrics = grpo.clip_metrics(terms, jnp.asarray(example["mask"]))
    lengths = np.array([5, 3, 1])
    share_low, share_high = low.sum(1)[:3] / lengths, high.sum(1)[:3] / lengths
    expected = [(low | high).sum() / 9, low.sum() / 9, share_low.min()]
    expected += [high.sum() / 9, share_high.max()]
    np.testing.assert_allclose(list(metrics.values()), expected, rtol=1e-6)


def test_the_worked_example_of_means_over_sequences_tokens_and_a_constant_length():
    """C3: one token of loss 1 beside nine of loss 2, in pencil."""
    mask = mask_of(1, 9, places=9)
    x = dict(logps=jnp.zeros((2, 9)), old=jnp.zeros((2, 9)), advantages=jnp.array([-1.0, -2.0]))
    expected = {"grpo": 1.5, "gspo": 1.5, "dapo": 1.9, "bnpo": 1.9, "dr_grpo": 19 / (2 * MOST)}
    for name, value in expected.items():
        loss, _ = loss_of(**x, mask=mask, config=grpo.LossConfig(name=name))
        np.testing.assert_allclose(loss, value, rtol=1e-6)


@pytest.mark.parametrize("name", grpo.LOSSES)
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_on_policy_the_gradient_is_weight_times_advantage(name, clip, example):
    """B21, C13: the loss may be 0, its gradient is not; also where the ratio sits at the bound."""
    config = grpo.LossConfig(name=name, clip_low=clip, clip_high=clip)
    x = arrays(example)
    weights = grpo.token_weights(x["mask"], name, MOST)
    grads = gradient_of(**{**x, "old": x["logps"]}, config=config)
    np.testing.assert_allclose(grads, -weights * x["advantages"][:, None], rtol=1e-6)


def test_clipped_tokens_have_no_gradient_but_those_of_cispo_keep_a_bounded_one():
    old = jnp.log(jnp.array([[0.1, 0.1, 0.2, 0.2]]))
    logps = jnp.log(jnp.array([[0.2, 0.05, 0.1, 0.4]]))

    def grad(name, advantage):
        x = dict(old=old, advantages=jnp.array([advantage]), mask=jnp.ones((1, 4), bool))
        return gradient_of(logps, **x, config=grpo.LossConfig(name=name))[0]

    np.testing.assert_allclose(grad("dapo", 1.0), [0, -0.125, -0.125, 0])
    np.testing.assert_allclose(grad("dapo", -1.0), [0.5, 0, 0, 0.5])
    np.testing.assert_allclose(grad("cispo", 1.0), [-0.3, -0.2, -0.2, -0.3])
    np.testing.assert_allclose(grad("cispo", -1.0), [0.3, 0.2, 0.2, 0.3])
    # The geometric mean of the four ratios is 1: no token of the sequence is clipped.
    np.testing.assert_allclose(grad("gspo", 1.0), [-0.25] * 4)


@pytest.mark.parametrize("name", grpo.LOSSES)
def test_nan_outside_the_mask_reaches_neither_loss_nor_gradient(name, example):
    """C6"""
    config = grpo.LossConfig(name=name, kl_beta=0.1)
    clean = arrays(example, importance=np.full((4, 5), 0.7))
    dirty = dict(clean)
    bad = dict(logps=-jnp.inf, old=jnp.nan, reference=jnp.inf, importance=jnp.nan)
    for key, value in bad.items():
        dirty[key] = jnp.where(clean["mask"], clean[key], value)
    dirty["advantages"] = clean["advantages"].at[3].set(jnp.nan)  # an empty row
    for run in (
        lambda x: loss_of(**x, config=config)[0],
        lambda x: gradient_of(**x, config=config),
    ):
        ours, theirs = run(dirty), run(clean)
        assert np.isfinite(theirs).all()
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", grpo.LOSSES)
def test_a_batch_without_tokens_has_loss_gradient_and_metrics_zero(name):
    """C4"""
    nothing = jnp.full((2, 3), jnp.nan)
    x = dict(logps=nothing, old=nothing, reference=nothing, importance=nothing)
    x |= dict(advantages=jnp.ones(2), mask=jnp.zeros((2, 3), bool))
    config = grpo.LossConfig(name=name, kl_beta=1.0)
    loss, terms = loss_of(**x, config=config)
    assert loss == 0
    np.testing.assert_array_equal(gradient_of(**x, config=config), 0)
    for value in grpo.clip_metrics(terms, x["mask"]).values():
        assert value == 0


@pytest.mark.parametrize("name", grpo.LOSSES)
def test_the_expected_gradient_is_that_of_the_expected_reward(name):
    """Over all 9 sequences of two tokens of a vocabulary of 3, a policy with 12 free logits."""
    rng = np.random.default_rng(0)
    theta = dict(first=jnp.asarray(rng.normal(size=3)), then=jnp.asarray(rng.normal(size=(3, 3))))
    reward = jnp.asarray(rng.normal(size=(3, 3)))
    everything = jnp.stack(jnp.meshgrid(*[jnp.arange(3)] * 2, indexing="ij"), -1).reshape(-1, 2)

    def logps(theta):
        first, then = (jax.nn.log_softmax(theta[k]) for k in ("first", "then"))
        a, b = everything.T
        return jnp.stack([first[a], then[a, b]], axis=1)

    def exact(theta):
        return jnp.sum(jnp.exp(logps(theta).sum(1)) * reward.reshape(-1))

    def sampled(theta, n):
        row = logps(theta)[n : n + 1]
        x = dict(logps=row, old=jax.lax.stop_gradient(row), mask=jnp.ones((1, 2), bool))
        advantages = reward.reshape(-1)[n : n + 1]
        return loss_of(**x, advantages=advantages, config=grpo.LossConfig(name=name))[0]

    chance = jnp.exp(logps(theta).sum(1))
    found = jax.tree.map(
        lambda *g: sum(p * x for p, x in zip(chance, g)),
        *(jax.grad(sampled)(theta, n) for n in range(9)),
    )
    weight = 1 / MOST if name == "dr_grpo" else 1 / 2
    expected = jax.tree.map(lambda g: -weight * g, jax.grad(exact)(theta))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), found, expected)
