import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import head
from fastgrpo_jax.train import distill, grpo

J = 2


def example():
    rng = np.random.default_rng(0)
    mask = np.arange(3) < np.array([3, 1, 0])[:, None]
    drafts = head.DraftScores(rng.uniform(1, 3, (3, 3, J)), rng.uniform(0, 1, (3, 3, J)))
    return rng.normal(0, 2, (3, 3, J, 4)), rng.normal(0, 2, (3, 3, 4)), drafts, mask


def loss_of(next_feature, feature, drafts, mask, config):
    weights = jnp.repeat(
        grpo.token_weights(jnp.asarray(mask), "grpo", mask.shape[1])[..., None], J, axis=2
    )
    next_feature, feature, drafts = jax.tree.map(jnp.asarray, (next_feature, feature, drafts))
    distance = distill.feature_distance(next_feature, feature, weights > 0)
    return distill.drafter_loss(distance, drafts, weights, config)


@pytest.mark.parametrize("kind", distill.TOKEN_LOSSES)
def test_the_loss_is_the_mean_over_sequences_of_token_means(kind):
    """Unequal lengths and an empty row; differences on both sides of 1; two unrolled steps."""
    next_feature, feature, drafts, mask = example()
    rows, kept = [], []
    for n in range(2):
        count = int(mask[n].sum())
        total = 0.0
        for j in range(J):
            share = {"ce": 1.0, "tv": 0.0}.get(kind)
            if share is None:
                share = np.exp(-3 * (1 - drafts.tv[n, :count, j].mean()))
            for t in range(count):
                d = np.abs(next_feature[n, t, j] - feature[n, t])
                l1 = np.mean([x * x / 2 if x < 1 else x - 0.5 for x in d])
                token = share * drafts.ce[n, t, j] + (1 - share) * drafts.tv[n, t, j]
                total += 0.7**j * (2.0 * l1 + 0.1 * token) / count
        rows.append(total)
        kept.append(1 - drafts.tv[n, :count, 0].mean())
    config = distill.DistillConfig(token_loss=kind, unroll=J, decay=0.7)
    loss, acceptance = loss_of(next_feature, feature, drafts, mask, config)
    np.testing.assert_allclose(loss, np.mean(rows), rtol=2e-7)
    np.testing.assert_allclose(acceptance, np.mean(kept), rtol=2e-7)
    only_tokens = distill.DistillConfig(0.0, 1.0, "ce", unroll=J, decay=0.0)
    np.testing.assert_allclose(
        loss_of(next_feature, feature, drafts, mask, only_tokens)[0],
        (drafts.ce[0, :, 0].mean() + drafts.ce[1, 0, 0]) / 2,
        rtol=2e-7,
    )


@pytest.mark.parametrize("kind", distill.TOKEN_LOSSES)
def test_nan_outside_the_mask_reaches_neither_loss_nor_gradient(kind):
    """C6"""
    next_feature, feature, drafts, mask = jax.tree.map(jnp.asarray, example())
    config = distill.DistillConfig(token_loss=kind, unroll=J)
    dirty = jnp.where(mask[..., None, None], next_feature, jnp.nan)
    dirty_feature = jnp.where(mask[..., None], feature, jnp.nan)
    dirty_drafts = jax.tree.map(lambda x: jnp.where(mask[..., None], x, jnp.inf), drafts)
    grad = jax.value_and_grad(loss_of, (0, 2), has_aux=True)
    ours = grad(dirty, dirty_feature, dirty_drafts, mask, config)
    theirs = grad(next_feature, feature, drafts, mask, config)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_smooth_l1_of_bfloat16_is_computed_in_float32():
    a = jnp.array([[1.0, 3.0]], jnp.bfloat16)
    out = distill.smooth_l1(a, jnp.zeros_like(a))
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, [(0.5 + 2.5) / 2])


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("token_weight", -1.0, "0 or more"),
        ("token_loss", "kl", "ce, tv, lk"),
        ("unroll", 0, "1 to 16"),
        ("decay", 1.5, "0 to 1"),
    ],
)
def test_a_field_out_of_its_range_is_refused(field, value, allowed):
    message = re.escape(f"drafter.{field} is {value!r}; allowed: {allowed}")
    with pytest.raises(base.UserError, match=message):
        distill.DistillConfig(**{field: value})
