"""The drafter's loss: teacher forcing on the policy's own training forward.

Pair t of a sequence is (f_t, e(x_{t+1})). From it the drafter gives next_feature_t, which
should be f_{t+1}, and hidden_t, whose head should give the policy's distribution of x_{t+2},
that is head(f_{t+1}). Both count where x_{t+2} is a response token: the mask is that of the
token, moved together with its targets. Unrolled steps go on from the drafter's own estimates.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fastgrpo_jax import base
from fastgrpo_jax.models import head, layers

TOKEN_LOSSES = ("ce", "tv", "lk")


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """Weights of the parts of the drafter's loss.

    Attributes:
      feature_weight: of SmoothL1(next_feature, f). FastGRPO (arXiv 2509.21792) has 2.0, EAGLE
        1.0, EAGLE-3 0.
      token_weight: of the token loss; FastGRPO and EAGLE have 0.1, EAGLE-3 1.0.
      token_loss: `ce` cross entropy under the policy's distribution p (its gradient is that of
        KL(p, q)), `tv` total variation, which is the chance that one draft is refused, or `lk`,
        l ce + (1 - l) tv with l = exp(-3 (1 - tv)), tv being a sequence's mean: likelihood
        first, acceptance later.
      unroll: steps of the training-time test (EAGLE-3, arXiv 2503.01840).
      decay: weight of each unrolled step relative to the one before.

    Raises:
      base.UserError: a field is out of its range.
    """

    feature_weight: float = 2.0
    token_weight: float = 0.1
    token_loss: str = "ce"
    unroll: int = 1
    decay: float = 0.8

    def __post_init__(self):
        ranges = {
            "feature_weight": (0 <= self.feature_weight < float("inf"), "0 or more"),
            "token_weight": (0 <= self.token_weight < float("inf"), "0 or more"),
            "token_loss": (self.token_loss in TOKEN_LOSSES, ", ".join(TOKEN_LOSSES)),
            "unroll": (1 <= self.unroll <= 16, "1 to 16"),
            "decay": (0 <= self.decay <= 1, "0 to 1"),
        }
        for field, (good, allowed) in ranges.items():
            if not good:
                raise base.UserError(
                    f"drafter.{field} is {getattr(self, field)!r}; allowed: {allowed}"
                )


def drafter_loss(
    distance: Float[Array, "N R J"],
    draft: head.DraftScores,
    weights: Float[Array, "N R J"],
    config: DistillConfig,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compute the drafter's loss over the response places of a batch, and 1 - tv of step 1.

        loss = sum of weight * decay^j * (feature_weight distance + token_weight token_loss)

    Args:
      distance: between the drafter's estimates, made from the pair two before the response token,
        and the policy's feature one before it; see `feature_distance`.
      draft: what was kept of the drafter's distributions of the token, [N, R, J] each.
      weights: the token mean of each sequence, then the mean over sequences; 0 where there
        is nothing to predict, and there the other arguments may hold NaN.
    """
    mask = weights > 0
    distance, ce, tv = (jnp.where(mask, x, 0) for x in (distance, *draft))
    if config.token_loss == "ce":
        token = ce
    elif config.token_loss == "tv":
        token = tv
    else:
        total = jnp.maximum(weights.sum(axis=1, keepdims=True), jnp.finfo(weights.dtype).tiny)
        mean = jnp.sum(weights * tv, axis=1, keepdims=True) / total
        share = jax.lax.stop_gradient(jnp.exp(-3 * (1 - mean)))
        token = share * ce + (1 - share) * tv
    scale = config.decay ** jnp.arange(config.unroll)
    loss = config.feature_weight * distance + config.token_weight * token
    acceptance = jnp.sum(weights[..., 0] * (1 - tv[..., 0]))
    return jnp.sum(weights * scale.astype(loss.dtype) * loss), jax.lax.stop_gradient(acceptance)


def feature_distance(
    next_feature: Float[Array, "A S J E"],
    feature: Float[Array, "A S E"],
    mask: Bool[Array, "A S J"],
) -> Float[Array, "A S J"]:
    """Compute SmoothL1 between estimates and the policy's features, which get no gradient.

    Where masked it is 0, and the arguments may hold NaN.
    """
    feature = jax.lax.stop_gradient(feature)[:, :, None]
    return smooth_l1(*(jnp.where(mask[..., None], x, 0) for x in (next_feature, feature)))


def smooth_l1(a: Float[Array, "*b E"], b: Float[Array, "*b E"]) -> Float[Array, "*b"]:
    """Average d^2 / 2 where |d| < 1, |d| - 1/2 elsewhere, over the last axis (d = a - b)."""
    wide = layers.at_least_float32(a.dtype)
    d = jnp.abs(a.astype(wide) - b.astype(wide))
    return jnp.mean(jnp.where(d < 1, d * d / 2, d - 0.5), axis=-1)
