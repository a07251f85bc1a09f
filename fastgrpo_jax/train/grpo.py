"""Advantages and policy losses: GRPO (arXiv 2402.03300) and its kin.

A loss is a weighted sum over response tokens. The weights hold every denominator and are
computed once for a batch, so however the batch is split afterwards, the parts add up to the
same loss. The losses differ in the weights, and in what a token's own term is:

| name      | weights                                         | a token's term                       |
|-----------|-------------------------------------------------|--------------------------------------|
| `grpo`    | mean over sequences of the mean over tokens     | clipped ratio of the token           |
| `dapo`    | mean over the batch's tokens (arXiv 2503.14476) | as grpo                              |
| `bnpo`    | as dapo: TRL's differ in whose tokens they mean | as grpo                              |
| `dr_grpo` | 1 / (sequences x max_response), arXiv 2503.20783 | as grpo                             |
| `gspo`    | as grpo                                         | clipped ratio of the sequence        |
| `cispo`   | as dapo                                         | log-prob, weighed by a clipped ratio |

TRL's `bnpo` averages over the tokens of a micro-batch, its `dapo` over those of all. Here a
micro-batch is no statistical unit: the split never changes the gradient, so the two agree.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fastgrpo_jax import base
from fastgrpo_jax.train import kl as kl_lib
from fastgrpo_jax.train import ratios

LOSSES = ("grpo", "bnpo", "dapo", "dr_grpo", "gspo", "cispo")
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
    kl_estimator: str = "k3"
    reference_sync_every: int = 0
    reference_sync_alpha: float = 0.6
    importance_cap: float = 0.0
    advantage_scale: str = "group"

    def __post_init__(self):
        _check_choice("loss.name", self.name, LOSSES)
        _check_choice("loss.kl_estimator", self.kl_estimator, kl_lib.ESTIMATORS)
        _check_choice("loss.advantage_scale", self.advantage_scale, SCALES)
        infinity, every = float("inf"), self.reference_sync_every
        ranges = {
            "clip_low": (0 <= self.clip_low <= 1, "[0, 1]"),
            "clip_high": (0 <= self.clip_high < infinity, "0 or more"),
            "kl_beta": (0 <= self.kl_beta < infinity, "0 or more"),
            "reference_sync_every": (
                0 <= every < 2**31 if self.kl_beta > 0 else every == 0,
                "0 (never) or more, and 0 where loss.kl_beta is 0, since there is no reference then",
            ),
            "reference_sync_alpha": (0 < self.reference_sync_alpha <= 1, "(0, 1]"),
            "importance_cap": (
                self.importance_cap == 0 or 1 <= self.importance_cap < infinity,
                "0 (off), or 1 or more",
            ),
        }
        for field, (good, allowed) in ranges.items():
            if not good:
                raise base.UserError(f"loss.{field} is {getattr(self, field)}; allowed: {allowed}")

    @property
    def by_sequence(self) -> bool:
        """Whether ratios are a sequence's, not a token's."""
        return self.name == "gspo"


class PolicyTerms(NamedTuple):
    """The loss per token, unweighted; 0 (False) where masked.

    clipped_low: the ratio fell below 1 - clip_low under a negative advantage, so that the
      token has no gradient; clipped_high: above 1 + clip_high under a positive one. Of `cispo`:
      the weight was clipped, whatever the advantage; the gradient stays.
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


def token_weights(mask: Bool[Array, "N R"], name: str, max_response: int) -> Float[Array, "N R"]:
    """Weight each response token by the table above; sequences without one do not count.

    The weights of a batch add up to 1 (`dr_grpo`: to its mean length over `max_response`
    tokens), or to 0 if all is masked.
    """
    tokens = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.int32)
    sequences = jnp.sum(tokens > 0, dtype=jnp.int32)
    denominator = {
        "grpo": tokens * sequences,
        "gspo": tokens * sequences,
        "dr_grpo": sequences * max_response,
    }.get(name, jnp.sum(tokens))
    return mask / jnp.maximum(denominator, 1).astype(jnp.float32)


def policy_loss(
    logps: Float[Array, "N R"],
    old_logps: Float[Array, "N R"],
    advantages: Float[Array, " N"],
    weights: Float[Array, "N R"],
    config: LossConfig,
    reference_logps: Float[Array, "N R"] | None = None,
    importance: Float[Array, "N R"] | None = None,
) -> tuple[Float[Array, ""], PolicyTerms]:
    """Compute the clipped policy loss, with a KL penalty where a reference is given.

        ratio_t = exp(logp_t - old_t)            gspo: exp(mean_t(logp_t - old_t)), arXiv 2507.18071
        objective = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)
        cispo (arXiv 2506.13585): objective = -stop_gradient(clip(ratio, 1 - low, 1 + high)) A logp
        loss = sum of weight * (importance * objective + kl_beta kl)

    `old_logps` are the proximal policy's, see `ratios`; `importance` (default: all 1) weighs the
    policy's term for what was sampled by another one, as in TRL. Of TRL's `cispo` the cap is
    1 + clip_high, and clip_low = 1 takes the lower bound off. Tokens of weight 0 may hold any
    value, NaN included. Written by cases, not by `minimum`, whose gradient halves at ties.
    """
    mask = weights > 0
    logps = jnp.where(mask, logps, 0)  # before any arithmetic, see ratios.ratio
    ratio = ratios.ratio(logps, old_logps, mask, config.by_sequence)
    scale = jnp.where(mask, advantages[:, None], 0)
    low, high = ratio < 1 - config.clip_low, ratio > 1 + config.clip_high
    if config.name != "cispo":
        low, high = low & (scale < 0), high & (scale > 0)
    bounded = jnp.where(low, 1 - config.clip_low, jnp.where(high, 1 + config.clip_high, ratio))
    if config.name == "cispo":
        bounded = jax.lax.stop_gradient(bounded) * logps
    objective = -bounded * scale
    if importance is not None:
        objective = jnp.where(mask, importance, 0) * objective
    per_token, kl = objective, None
    if reference_logps is not None:
        kl = kl_lib.estimate(config.kl_estimator, logps, jnp.where(mask, reference_logps, 0))
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
