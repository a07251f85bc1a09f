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
    "field, value, text",
    [
        ("name", "ppo", "loss.name is 'ppo'; allowed: grpo, dapo"),
        ("advantage_scale", "std", "advantage_scale is 'std'; allowed: group, batch, none"),
        ("clip_low", 1.0, "clip_low is 1.0"),
        ("clip_high", -0.1, "clip_high is -0.1"),
        ("kl_beta", NAN, "kl_beta is nan"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(field, value, text):
    with pytest.raises(base.UserError, match=text.replace("(", r"\(")):
        grpo.LossConfig(**{field: value})


def test_weights_are_sequence_means_or_token_means():
    """C3, C4: lengths 1, 4 and an empty row, which counts in neither."""
    mask = mask_of(1, 4, 0, places=4)
    grpo_weights = [[1 / 2, 0, 0, 0], [1 / 8] * 4, [0] * 4]
    np.testing.assert_allclose(grpo.token_weights(mask, "grpo"), grpo_weights)
    dapo_weights = [[1 / 5, 0, 0, 0], [1 / 5] * 4, [0] * 4]
    np.testing.assert_allclose(grpo.token_weights(mask, "dapo"), dapo_weights)
    for name in grpo.LOSSES:
        np.testing.assert_array_equal(grpo.token_weights(jnp.zeros((2, 3), bool), name), 0)


def longhand(logps, old, advantages, mask, config, reference):
    """Return the loss by the textbook formula, with `min` and `clip`."""
    rows, tokens = [], []
    for n in range(len(mask)):
        losses = []
        for t in range(int(mask[n].sum())):
            ratio = np.exp(logps[n, t] - old[n, t])
            clipped = np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
            ahead = reference[n, t] - logps[n, t]
            kl = np.exp(ahead) - ahead - 1
            value = -min(ratio * advantages[n], clipped * advantages[n])
            losses.append(value + config.kl_beta * kl)
        tokens += losses
        rows += [np.mean(losses)] if losses else []
    return np.mean(rows if config.name == "grpo" else tokens)


@pytest.fixture(scope="module")
def example():
    rng = np.random.default_rng(0)
    old = rng.normal(-2, 0.5, (4, 5))
    return dict(
        logps=old + rng.normal(0, 0.4, (4, 5)),
        old=old,
        advantages=np.array([1.5, -0.7, 0.3, 0.9]),
        mask=np.asarray(mask_of(5, 4, 1, 0)),
        reference=old + rng.normal(0, 0.4, (4, 5)),
    )


def loss_of(logps, old, advantages, mask, config, reference):
    weights = grpo.token_weights(mask, config.name)
    return grpo.policy_loss(logps, jnp.asarray(old), advantages, weights, config, reference)


@pytest.mark.parametrize("name", grpo.LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_the_loss_is_the_textbook_formula(name, beta, example):
    config = grpo.LossConfig(name=name, clip_low=0.1, clip_high=0.3, kl_beta=beta)
    x = {k: jnp.asarray(v) for k, v in example.items()}
    loss, terms = loss_of(**x, config=config)
    np.testing.assert_allclose(loss, longhand(**example, config=config), rtol=1e-7)
    ratio = np.exp(example["logps"] - example["old"])
    positive = (example["advantages"] > 0)[:, None]
    high = example["mask"] & positive & (ratio > 1.3)
    low = example["mask"] & ~positive & (ratio < 0.9)
    assert high.any() and low.any()
    np.testing.assert_array_equal(terms.clipped_high, high)
    np.testing.assert_array_equal(terms.clipped_low, low)
    assert (np.asarray(terms.kl) >= 0).all()
    metrics = grpo.clip_metrics(terms, x["mask"])
    share_low, share_high = low.sum(1)[:3] / [5, 4, 1], high.sum(1)[:3] / [5, 4, 1]
    expected = [(low | high).sum() / 10, low.sum() / 10, share_low.min()]
    expected += [high.sum() / 10, share_high.max()]
    np.testing.assert_allclose(list(metrics.values()), expected, rtol=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_on_policy_the_gradient_is_weight_times_advantage(clip, example):
    """B21, C13: the loss may be 0, its gradient is not; also where the ratio sits at the bound."""
    config = grpo.LossConfig(clip_low=clip, clip_high=clip)
    x = {k: jnp.asarray(v) for k, v in example.items()}
    weights = grpo.token_weights(x["mask"], "grpo")

    def loss(logps):
        return grpo.policy_loss(logps, x["logps"], x["advantages"], weights, config)[0]

    np.testing.assert_allclose(jax.grad(loss)(x["logps"]), -weights * x["advantages"][:, None])


def test_clipped_tokens_have_no_gradient():
    weights = jnp.full((1, 4), 0.25)
    old = jnp.log(jnp.array([[0.1, 0.1, 0.2, 0.2]]))
    logps = jnp.log(jnp.array([[0.2, 0.05, 0.1, 0.4]]))

    def grad(advantage):
        def loss(logps):
            return grpo.policy_loss(logps, old, jnp.array([advantage]), weights, grpo.LossConfig())[
                0
            ]

        return jax.grad(loss)(logps)[0]

    np.testing.assert_allclose(grad(1.0), [0, -0.125, -0.125, 0])
    np.testing.assert_allclose(grad(-1.0), [0.5, 0, 0, 0.5])


def test_nan_outside_the_mask_reaches_neither_loss_nor_gradient(example):
    """C6"""
    config = grpo.LossConfig(kl_beta=0.1)
    clean = {k: jnp.asarray(v) for k, v in example.items()}
    dirty = dict(clean)
    for key, bad in (("logps", -jnp.inf), ("old", jnp.nan), ("reference", jnp.inf)):
        dirty[key] = jnp.where(clean["mask"], clean[key], bad)
    dirty["advantages"] = clean["advantages"].at[3].set(jnp.nan)  # an empty row

    def run(x):
        return lambda logps: loss_of(**{**x, "logps": logps}, config=config)[0]

    for ours, theirs in zip(
        jax.value_and_grad(run(dirty))(dirty["logps"]),
        jax.value_and_grad(run(clean))(clean["logps"]),
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", grpo.LOSSES)
def test_a_batch_without_tokens_has_loss_and_metrics_zero(name):
    """C4"""
    mask = jnp.zeros((2, 3), bool)
    nothing = jnp.full((2, 3), jnp.nan)
    loss, terms = loss_of(
        nothing, nothing, jnp.ones(2), mask, grpo.LossConfig(name=name, kl_beta=1.0), nothing
    )
    assert loss == 0
    for value in grpo.clip_metrics(terms, mask).values():
        assert value == 0
    values = list(grpo.sampling_metrics(nothing, nothing, mask).values())
    np.testing.assert_array_equal(values, [0, 0, 1, 1, 1])


def test_sampling_metrics_compare_response_tokens_only():
    mask = mask_of(2, 1, places=2)
    trainer = jnp.array([[-1.0, -2.0], [-3.0, NAN]])
    behaviour = jnp.array([[-1.5, -2.0], [-2.0, 9.0]])
    got = grpo.sampling_metrics(trainer, behaviour, mask)
    ratios = [np.exp(0.5), 1, np.exp(-1)]
    np.testing.assert_allclose(
        list(got.values()), [0.5, 1, ratios[2], np.mean(ratios), ratios[0]], rtol=1e-6
    )


def test_the_expected_gradient_of_the_kl_term_is_that_of_the_exact_divergence():
    """C12: on 5 tokens, E_policy[grad k3] = grad KL(reference || policy); values >= 0."""
    rng = np.random.default_rng(0)
    logits, reference = jnp.asarray(rng.normal(size=5)), jax.nn.log_softmax(rng.normal(size=5))
    weights = jnp.ones((1, 1))
    config = grpo.LossConfig(kl_beta=1.0)

    def k3(logits, token):
        logp = jax.nn.log_softmax(logits)[token].reshape(1, 1)
        old, zero = jax.lax.stop_gradient(logp), jnp.zeros(1)
        return grpo.policy_loss(logp, old, zero, weights, config, reference[token].reshape(1, 1))[0]

    p = jax.nn.softmax(logits)
    assert all(k3(logits, i) >= 0 for i in range(5))
    expected = sum(p[i] * jax.grad(k3)(logits, i) for i in range(5))
    exact = jax.grad(lambda x: jnp.sum(jnp.exp(reference) * (reference - jax.nn.log_softmax(x))))(
        logits
    )
    np.testing.assert_allclose(expected, exact, atol=1e-7)
    value = sum(p[i] * k3(logits, i) for i in range(5))
    np.testing.assert_allclose(value, np.sum(p * (np.log(p) - reference)), rtol=1e-6)
