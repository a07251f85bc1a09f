"""The drafter's loss: one-step teacher forcing on the policy's own training forward.

Pair t of a sequence is (f_t, e(x_{t+1})). From it the drafter gives next_feature_t, which
should be f_{t+1}, and hidden_t, whose head should give the policy's distribution of x_{t+2},
that is head(f_{t+1}). Both count where x_{t+2} is a response token: the mask is that of the
token, moved together with its targets.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from fastgrpo_jax import base
from fastgrpo_jax.models import layers


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """Weights of the two parts; FastGRPO (arXiv 2509.21792) has 2.0 and 0.1, EAGLE 1.0 and 0.1.

    Raises:
      base.UserError: a weight is negative.
    """

    feature_weight: float = 2.0
    token_weight: float = 0.1

    def __post_init__(self):
        for field in ("feature_weight", "token_weight"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise base.UserError(
                    f"drafter.{field} is {getattr(self, field)}; allowed: 0 or more"
                )


def drafter_loss(
    next_feature: Float[Array, "N R E"],
    feature: Float[Array, "N R E"],
    draft_ce: Float[Array, "N R"],
    weights: Float[Array, "N R"],
    config: DistillConfig,
) -> Float[Array, ""]:
    """Compute the drafter's loss over the response places of a batch.

        loss = sum of weight * (feature_weight SmoothL1(next_feature, feature)
                                + token_weight draft_ce)

    Args:
      next_feature: the drafter's estimate from the pair two before the response token.
      feature: the policy's feature one before the token, without a gradient.
      draft_ce: cross entropy of the drafter's distribution of the token, see `models/head.py`.
      weights: the token mean of each sequence, then the mean over sequences; 0 where there
        is nothing to predict, and there the other arguments may hold NaN.
    """
    mask = weights > 0
    distance = smooth_l1(
        jnp.where(mask[..., None], next_feature, 0), jnp.where(mask[..., None], feature, 0)
    )
    draft_ce = jnp.where(mask, draft_ce, 0)
    return jnp.sum(weights * (config.feature_weight * distance + config.token_weight * draft_ce))


def smooth_l1(a: Float[Array, "*b E"], b: Float[Array, "*b E"]) -> Float[Array, "*b"]:
    """Average d^2 / 2 where |d| < 1, |d| - 1/2 elsewhere, over the last axis (d = a - b)."""
    wide = layers.at_least_float32(a.dtype)
    d = jnp.abs(a.astype(wide) - b.astype(wide))
    return jnp.mean(jnp.where(d < 1, d * d / 2, d - 0.5), axis=-1)
