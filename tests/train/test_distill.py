import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.train import distill, grpo


def example():
    rng = np.random.default_rng(0)
    mask = np.arange(3) < np.array([3, 1, 0])[:, None]
    return rng.normal(0, 2, (3, 3, 4)), rng.normal(0, 2, (3, 3, 4)), rng.uniform(1, 3, (3, 3)), mask


def loss_of(next_feature, feature, ce, mask, config):
    weights = grpo.token_weights(mask, "grpo")
    return distill.drafter_loss(next_feature, feature, ce, weights, config)


def test_the_loss_is_the_mean_over_sequences_of_token_means():
    """Unequal lengths and an empty row; differences on both sides of 1."""
    next_feature, feature, ce, mask = example()
    rows = []
    for n in range(2):
        tokens = []
        for t in range(int(mask[n].sum())):
            d = np.abs(next_feature[n, t] - feature[n, t])
            l1 = np.mean([x * x / 2 if x < 1 else x - 0.5 for x in d])
            tokens.append(2.0 * l1 + 0.1 * ce[n, t])
        rows.append(np.mean(tokens))
    args = [jnp.asarray(x) for x in (next_feature, feature, ce, mask)]
    ours = loss_of(*args, distill.DistillConfig())
    np.testing.assert_allclose(ours, np.mean(rows), rtol=1e-7)
    only_tokens = loss_of(*args, distill.DistillConfig(feature_weight=0.0, token_weight=1.0))
    np.testing.assert_allclose(only_tokens, (ce[0].mean() + ce[1, 0]) / 2, rtol=1e-7)


def test_nan_outside_the_mask_reaches_neither_loss_nor_gradient():
    """C6"""
    next_feature, feature, ce, mask = (jnp.asarray(x) for x in example())
    config = distill.DistillConfig()
    dirty = [jnp.where(mask[..., None], x, jnp.nan) for x in (next_feature, feature)]
    dirty_ce = jnp.where(mask, ce, jnp.inf)
    grad = jax.value_and_grad(loss_of, (0, 2))
    ours = grad(*dirty, dirty_ce, mask, config)
    theirs = grad(next_feature, feature, ce, mask, config)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_smooth_l1_of_bfloat16_is_computed_in_float32():
    a = jnp.array([[1.0, 3.0]], jnp.bfloat16)
    out = distill.smooth_l1(a, jnp.zeros_like(a))
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, [(0.5 + 2.5) / 2])


def test_a_negative_weight_is_refused():
    with pytest.raises(base.UserError, match=r"drafter.token_weight is -1.0; allowed: 0 or more"):
        distill.DistillConfig(token_weight=-1.0)
