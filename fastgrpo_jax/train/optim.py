"""AdamW with clipping and warm-up, and the guard that skips a non-finite update.

The policy and the drafter have one chain each: neither's gradients enter the other's norm.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from fastgrpo_jax import base


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019); see the config keys `optim.*` and `drafter.*`.

    `section` is the group of config keys that the values come from, for messages.

    Raises:
      base.UserError: a field is out of its range.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    decay_steps: int = 0
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    section: str = "optim"

    def __post_init__(self):
        infinity = float("inf")
        ranges = {
            "learning_rate": (0 <= self.learning_rate < infinity, "0 or more"),
            "warmup_steps": (0 <= self.warmup_steps < 2**31, "0 or more, below 2**31"),
            "decay_steps": (0 <= self.decay_steps < 2**31, "0 or more, below 2**31"),
            "weight_decay": (0 <= self.weight_decay < infinity, "0 or more"),
            "b1": (0 <= self.b1 < 1, "[0, 1)"),
            "b2": (0 <= self.b2 < 1, "[0, 1)"),
            "eps": (0 < self.eps < infinity, "above 0"),
            "max_grad_norm": (self.max_grad_norm > 0, "above 0"),
        }
        for field, (good, allowed) in ranges.items():
            if not good:
                raise base.UserError(
                    f"{self.section}.{field} is {getattr(self, field)}; allowed: {allowed}"
                )


class Update(NamedTuple):
    """Result of one guarded update.

    grad_norm: global norm before clipping.
    applied: False if the loss or the norm was not finite; then parameters and optimiser
      state are bitwise those that came in.
    """

    params: base.Params
    opt_state: Any
    grad_norm: Float[Array, ""]
    applied: Bool[Array, ""]


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Build the chain: clip by the global norm, Adam, weight decay, learning rate.

    Moments take the dtype of the parameters given to `init` (the masters). Decay leaves out
    vectors, which are the norms and the biases.
    """

    def matrices(params):
        return jax.tree.map(lambda p: p.ndim >= 2, params)

    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, matrices),
        optax.scale_by_learning_rate(lambda count: _schedule(config, count)),
    )


def learning_rate(config: OptimConfig, opt_state: Any) -> Float[Array, ""]:
    """Compute the rate of the next update: linear warm-up from rate / warmup_steps, then constant,
    or half a cosine that reaches 0 after `decay_steps` updates in all.

    Skipped updates do not count.
    """
    return _schedule(config, opt_state[1].count)  # of Adam, second in the chain


def guarded_update(
    optimizer: optax.GradientTransformation,
    loss: Float[Array, ""],
    grads: base.Params,
    params: base.Params,
    opt_state: Any,
) -> Update:
    """Apply the gradients, unless the loss or the gradients' norm is NaN or infinite."""
    norm = optax.global_norm(grads)
    applied = jnp.isfinite(loss) & jnp.isfinite(norm)
    updates, new_state = optimizer.update(grads, opt_state, params)

    def choose(new, old):
        return jnp.where(applied, new, old)

    return Update(
        params=jax.tree.map(choose, optax.apply_updates(params, updates), params),
        opt_state=jax.tree.map(choose, new_state, opt_state),
        grad_norm=norm,
        applied=applied,
    )


def _schedule(config: OptimConfig, count) -> Float[Array, ""]:
    warm = (count + 1).astype(jnp.float32) / max(config.warmup_steps, 1)
    rate = jnp.float32(config.learning_rate) * jnp.minimum(warm, 1)
    if not config.decay_steps:
        return rate
    done = jnp.clip(count.astype(jnp.float32) / config.decay_steps, 0, 1)
    return rate * 0.5 * (1 + jnp.cos(jnp.pi * done))
