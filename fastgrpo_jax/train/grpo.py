"""Advantages and policy losses (GRPO, arXiv 2402.03300; DAPO's token mean, arXiv 2503.14476).

A loss is a weighted sum over response tokens. The weights carry the whole difference between
the losses and hold every denominator; they are computed once for a batch, so however the
batch is split afterwards, the parts add up to the same loss.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fastgrpo_jax import base

LOSSES = ("grpo", "dapo")
SCALES = ("group", "batch", "none")
STD_EPS = 1e-4  # added to a standard deviation before dividing by it, as TRL does


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Which policy loss, see the config keys `loss.*`.

    Raises:
      base.UserError: a field is not allowed.
    """

    name: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_beta: float = 0.0
    advantage_scale: str = "group"

    def __post_init__(self):
        _check_choice("loss.name", self.name, LOSSES)
        _check_choice("loss.advantage_scale", self.advantage_scale, SCALES)
        if not 0 <= self.clip_low < 1:
            raise base.UserError(f"loss.clip_low is {self.clip_low}; allowed: [0, 1)")
        if not 0 <= self.clip_high < float("inf"):
            raise base.UserError(f"loss.clip_high is {self.clip_high}; allowed: 0 or more")
        if not 0 <= self.kl_beta < float("inf"):
            raise base.UserError(f"loss.kl_beta is {self.kl_beta}; allowed: 0 or more")


class PolicyTerms(NamedTuple):
    """The loss per token, unweighted; 0 (False) where masked.

    clipped_low: the ratio fell below 1 - clip_low under a negative advantage, so that the
      token has no gradient; clipped_high: above 1 + clip_high under a positive one.
    kl: None without a reference.
    """

    objective: Float[Array, "N R"]
    clipped_low: Bool[Array, "N R"]
    clipped_high: Bool[Array, "N R"]
    kl: Float[Array, "N R"] | None


def advantages(rewards: Float[np.ndarray, "P G"], scale: str) -> Float[np.ndarray, "P G"]:
    """Compute float32 advantages of groups of rewards; NaN marks a row that has no score.

        A = (r - mean_group) / (std + 1e-4)

    `std` is the group's (scale "group"), the whole batch's ("batch"), or left out ("none");
    it is the unbiased one (n - 1), as in TRL. Rows without a score are outside every mean
    and get 0, and so does a group with fewer than two scores.

    Raises:
      base.UserError: a group of one, an infinite reward, an unknown scale.
    """
    _check_choice("loss.advantage_scale", scale, SCALES)
    if rewards.shape[1] < 2:
        raise base.UserError(
            f"task.group is {rewards.shape[1]}; allowed: 2 or more, since an advantage compares "
            "the completions of a group"
        )
    if np.isinf(rewards).any():
        raise base.UserError(f"rewards hold {rewards[np.isinf(rewards)][0]}; allowed: finite")
    deviation = _deviations(rewards)
    if scale == "group":
        deviation /= group_std(rewards)[:, None] + STD_EPS
    if scale == "batch":
        deviation /= group_std(rewards.reshape(1, -1)) + STD_EPS
    return deviation.astype(np.float32)


def group_std(rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, " P"]:
    """Compute each group's unbiased standard deviation; 0 with fewer than two scores (not NaN).

    Equal rewards give exactly 0, whatever their value.
    """
    count = (~np.isnan(rewards)).sum(axis=1)
    return np.sqrt((_deviations(rewards) ** 2).sum(axis=1) / np.maximum(count - 1, 1))


def token_weights(mask: Bool[Array, "N R"], name: str) -> Float[Array, "N R"]:
    """Weight each response token; the weights of a batch add up to 1 (0 if all is masked).

    `grpo`: the mean over sequences of the mean over their tokens; sequences without a
    response token do not count. `dapo`: the mean over all tokens.
    """
    tokens = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.int32)
    if name == "dapo":
        denominator = jnp.sum(tokens)
    else:
        denominator = tokens * jnp.sum(tokens > 0, dtype=jnp.int32)
    return mask / jnp.maximum(denominator, 1).astype(jnp.float32)


def policy_loss(
    logps: Float[Array, "N R"],
    old_logps: Float[Array, "N R"],
    advantages: Float[Array, " N"],
    weights: Float[Array, "N R"],
    config: LossConfig,
    reference_logps: Float[Array, "N R"] | None = None,
) -> tuple[Float[Array, ""], PolicyTerms]:
    """Compute the clipped policy loss, with a KL penalty where a reference is given.

        ratio = exp(logp - old);  objective = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)
        kl = exp(ref - logp) - (ref - logp) - 1
        loss = sum of weight * (objective + kl_beta kl)

    The KL estimate (k3, Schulman 2020) is GRPO's; the gradient that it sends through the
    log-probs is on average that of KL(reference || policy). Tokens of weight 0 may hold any
    value, NaN included. Written by cases, not by `minimum`, whose gradient halves at ties.
    """
    mask = weights > 0
    # Neutralised before any arithmetic: a mask after it would stop the NaN, not its gradient.
    logps = jnp.where(mask, logps, 0)
    ratio = jnp.exp(logps - jnp.where(mask, old_logps, 0))
    scale = jnp.where(mask, advantages[:, None], 0)
    low = (scale < 0) & (ratio < 1 - config.clip_low)
    high = (scale > 0) & (ratio > 1 + config.clip_high)
    bounded = jnp.where(low, 1 - config.clip_low, jnp.where(high, 1 + config.clip_high, ratio))
    objective = per_token = -bounded * scale
    kl = None
    if reference_logps is not None:
        ahead = jnp.where(mask, reference_logps, 0) - logps
        kl = jnp.exp(ahead) - ahead - 1
        per_token = objective + config.kl_beta * kl
    return jnp.sum(weights * per_token), PolicyTerms(objective, low, high, kl)


def token_mean(x: Float[Array, "N R"], mask: Bool[Array, "N R"]) -> Float[Array, ""]:
    """Average over the response tokens of a batch; 0 if there are none."""
    return jnp.sum(jnp.where(mask, x, 0)) / jnp.maximum(jnp.sum(mask, dtype=jnp.int32), 1)


def clip_metrics(terms: PolicyTerms, mask: Bool[Array, "N R"]) -> dict[str, Float[Array, ""]]:
    """Compute the shares of clipped tokens: over the batch, and of the extreme sequences."""
    low, high = terms.clipped_low.astype(jnp.float32), terms.clipped_high.astype(jnp.float32)
    tokens = jnp.sum(mask, axis=1, dtype=jnp.int32)
    share_low = jnp.sum(low, axis=1) / jnp.maximum(tokens, 1)
    share_high = jnp.sum(high, axis=1) / jnp.maximum(tokens, 1)
    low_min = jnp.min(jnp.where(tokens > 0, share_low, 1))
    return {
        "clip_ratio/region_mean": token_mean(low + high, mask),
        "clip_ratio/low_mean": token_mean(low, mask),
        "clip_ratio/low_min": jnp.where(jnp.any(tokens > 0), low_min, 0),
        "clip_ratio/high_mean": token_mean(high, mask),
        "clip_ratio/high_max": jnp.max(share_high),
    }


def sampling_metrics(
    logps: Float[Array, "N R"], behaviour: Float[Array, "N R"], mask: Bool[Array, "N R"]
) -> dict[str, Float[Array, ""]]:
    """Compare the trainer's log-probs with those recorded by the rollout.

    The differences are rounding as long as both run the same weights; 0 and ratios of 1 if
    there are no tokens.
    """
    difference = jnp.where(mask, logps - behaviour, 0)
    ratio = jnp.exp(difference)
    some = jnp.any(mask)
    return {
        "sampling/sampling_logp_difference/mean": token_mean(jnp.abs(difference), mask),
        "sampling/sampling_logp_difference/max": jnp.max(jnp.abs(difference)),
        "sampling/importance_sampling_ratio/min": jnp.min(
            jnp.where(mask | ~some, ratio, jnp.inf),
        ),
        "sampling/importance_sampling_ratio/mean": jnp.where(some, token_mean(ratio, mask), 1),
        "sampling/importance_sampling_ratio/max": jnp.max(jnp.where(mask | ~some, ratio, 0)),
    }


def _deviations(rewards) -> Float[np.ndarray, "P G"]:
    """Subtract each group's mean in float64; rows without a score get 0.

    The smallest reward is taken off first: the mean of equal rewards such as 0.1 is not
    exactly 0.1, but the mean of zeros is 0.
    """
    scored = ~np.isnan(rewards)
    wide = rewards.astype(np.float64)
    lowest = np.where(scored, wide, np.inf).min(axis=1, keepdims=True)
    shifted = np.where(scored, wide - np.where(np.isinf(lowest), 0, lowest), 0)
    mean = shifted.sum(axis=1, keepdims=True) / np.maximum(scored.sum(axis=1, keepdims=True), 1)
    return np.where(scored, shifted - mean, 0)


def _check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise base.UserError(f"{field} is {value!r}; allowed: {', '.join(allowed)}")
