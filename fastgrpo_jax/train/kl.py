"""Estimators of KL(policy || reference) from the policy's own samples.

Schulman 2020, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

ESTIMATORS = ("k1", "k2", "k3")


def estimate(
    kind: str, logps: Float[Array, "N R"], reference_logps: Float[Array, "N R"]
) -> Float[Array, "N R"]:
    """Estimate the divergence at each token x ~ policy, with d = log policy(x) - log reference(x).

        k1 = d      k2 = d^2 / 2      k3 = exp(-d) + d - 1

    As a value: k1 and k3 are unbiased, k2 is not (it is right where the two are close); k2 and
    k3 are never negative. As a term of a loss, whose gradient passes through log policy(x):

    - k1: grad log policy(x), 0 in expectation, so it teaches nothing but noise;
    - k2: d grad log policy(x), in expectation the gradient of KL(policy || reference) itself;
    - k3: (1 - exp(-d)) grad log policy(x), in expectation that of KL(reference || policy).

    All this holds token by token, given what precedes: what an earlier token does to the later
    divergences is left out, as it is in GRPO.
    """
    ahead = logps - reference_logps
    if kind == "k1":
        return ahead
    if kind == "k2":
        return 0.5 * jnp.square(ahead)
    return jnp.exp(-ahead) + ahead - 1
