"""Ratios between the policies of a token: current, proximal, behaviour.

The policy loss clips current / proximal, and may weigh tokens by proximal / behaviour. As long
as a rollout is trained on at once the proximal policy is the current one, so the first is
exactly 1, and the second differs from 1 by the rollout's rounding only.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def proximal(
    logps: Float[Array, "N R"],
    behaviour: Float[Array, "N R"] | None = None,
    staleness: Int[Array, " N"] | None = None,
) -> Float[Array, "N R"]:
    """Compute log-probs of the policy that ratios are clipped against; they have no gradient.

        log proximal = alpha log behaviour + (1 - alpha) log current,  alpha = 1 / staleness

    (A-3PO, arXiv 2512.06547: in place of a forward of its own.) `staleness` is how many updates
    ago a row was sampled; a row of 0, or all without it, has alpha = 0: current itself.
    """
    logps = jax.lax.stop_gradient(logps)
    if staleness is None:
        return logps
    stale = staleness[:, None]
    mixed = logps + (behaviour - logps) / jnp.maximum(stale, 1)
    return jnp.where(stale > 0, mixed, logps)


def importance(
    proximal: Float[Array, "N R"],
    behaviour: Float[Array, "N R"],
    mask: Bool[Array, "N R"],
    by_sequence: bool = False,
) -> Float[Array, "N R"]:
    """Compute exp(log proximal - log behaviour), without a gradient; 1 where masked.

    `by_sequence` takes the geometric mean over each sequence, which stays bounded where the
    product of so many ratios would not.
    """
    return jax.lax.stop_gradient(ratio(proximal, behaviour, mask, by_sequence))


def ratio(
    logps: Float[Array, "N R"],
    old_logps: Float[Array, "N R"],
    mask: Bool[Array, "N R"],
    by_sequence: bool = False,
) -> Float[Array, "N R"]:
    """Compute exp(logps - old), or its geometric mean over a sequence; 1 where masked.

    Masked places may hold any value, NaN included: they reach neither result nor gradient.
    """
    # Neutralised before any arithmetic: a mask after it would stop the NaN, not its gradient.
    difference = jnp.where(mask, logps, 0) - jnp.where(mask, old_logps, 0)
    if by_sequence:
        tokens = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.int32)
        mean = jnp.sum(difference, axis=1, keepdims=True) / jnp.maximum(tokens, 1)
        difference = jnp.where(mask, mean, 0)
    return jnp.exp(difference)


def truncate(
    ratio: Float[Array, "N R"], cap: float, staleness: Int[Array, " N"] | None = None
) -> Float[Array, "N R"] | None:
    """Make importance weights of proximal / behaviour ratios; None if all of them are 1.

    With a cap (not 0) each is min(ratio, cap): truncated importance sampling (Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training"). Without one only
    stale rows are weighed, untruncated.
    """
    if cap:
        return jnp.minimum(ratio, cap)
    if staleness is None:
        return None
    return jnp.where(staleness[:, None] > 0, ratio, 1)


def sampling_metrics(
    logps: Float[Array, "N R"],
    behaviour: Float[Array, "N R"],
    ratio: Float[Array, "N R"],
    mask: Bool[Array, "N R"],
    cap: float = 0.0,
) -> dict[str, Float[Array, ""]]:
    """Compare the trainer's log-probs with those recorded by the rollout.

    `ratio` is proximal / behaviour; with a cap (not 0) the metrics are of min(ratio, cap), and
    the share of the tokens that it cut is told. The differences are rounding as long as both
    run the same weights. Without tokens they are 0 and ratios 1.
    """
    difference = jnp.abs(jnp.where(mask, logps, 0) - jnp.where(mask, behaviour, 0))
    some, tokens = jnp.any(mask), jnp.maximum(jnp.sum(mask, dtype=jnp.int32), 1)
    used = jnp.minimum(ratio, cap) if cap else ratio

    def mean(x):
        return jnp.sum(jnp.where(mask, x, 0)) / tokens

    def extreme(reduce, outside):
        return reduce(jnp.where(mask, used, jnp.where(some, outside, 1)))

    metrics = {
        "sampling/sampling_logp_difference/mean": mean(difference),
        "sampling/sampling_logp_difference/max": jnp.max(difference),
        "sampling/importance_sampling_ratio/min": extreme(jnp.min, jnp.inf),
        "sampling/importance_sampling_ratio/mean": jnp.where(some, mean(used), 1),
        "sampling/importance_sampling_ratio/max": extreme(jnp.max, 0),
    }
    if cap:
        metrics["sampling/importance_sampling_ratio/capped"] = mean(ratio > cap)
    return metrics
