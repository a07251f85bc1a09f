"""AdamW or Muon with clipping and a schedule, and the guard that skips a non-finite update.

The policy and the drafter have one chain each: neither's gradients enter the other's norm.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Bool, Float, Int

from fastgrpo_jax import base

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("constant", "linear", "cosine")
MU_DTYPES = ("", "bfloat16")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019) or Muon (https://kellerjordan.github.io/posts/muon/).

    See the config keys `optim.*` and `drafter.*`.

    Attributes:
      optimizer: `adamw`, or `muon`, which makes the update of each matrix orthogonal; vectors and the
        embedding stay with Adam.
      decay_steps: updates in all, warm-up included, after which a `linear` or `cosine` rate is 0.
      mu_dtype: of the first moment; empty: that of the parameters.
      section: the group of config keys that the values come from, for messages.

    Raises:
      base.UserError: a field is out of its range.
    """

    optimizer: str = "adamw"
    learning_rate: float = 1e-6
    schedule: str = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    mu_dtype: str = ""
    section: str = "optim"

    def __post_init__(self):
        infinity = float("inf")
        decays = self.schedule != "constant"
        last = f"above {self.section}.warmup_steps = {self.warmup_steps}, where the rate decays"
        ranges = {
            "optimizer": (self.optimizer in OPTIMIZERS, ", ".join(OPTIMIZERS)),
            "learning_rate": (0 <= self.learning_rate < infinity, "0 or more"),
            "schedule": (self.schedule in SCHEDULES, ", ".join(SCHEDULES)),
            "warmup_steps": (0 <= self.warmup_steps < 2**31, "0 or more, below 2**31"),
            "decay_steps": (
                self.warmup_steps < self.decay_steps < 2**31 if decays else not self.decay_steps,
                f"{last}, below 2**31" if decays else "0, since a constant rate does not decay",
            ),
            "weight_decay": (0 <= self.weight_decay < infinity, "0 or more"),
            "b1": (0 <= self.b1 < 1, "[0, 1)"),
            "b2": (0 <= self.b2 < 1, "[0, 1)"),
            "eps": (0 < self.eps < infinity, "above 0"),
            "max_grad_norm": (self.max_grad_norm > 0, "above 0"),
            "mu_dtype": (self.mu_dtype in MU_DTYPES, "bfloat16, or empty for the parameters' own"),
        }
        for field, (good, allowed) in ranges.items():
            if not good:
                value = getattr(self, field)
                shown = repr(value) if isinstance(value, str) else value
                raise base.UserError(f"{self.section}.{field} is {shown}; allowed: {allowed}")


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
    """Build the chain: clip by the global norm, Adam or Muon, weight decay, learning rate.

    Moments take the dtype of the parameters given to `init` (the masters), the first one
    `mu_dtype` if that is set.
    """
    dtype = config.mu_dtype or None
    scale = optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=dtype)
    if config.optimizer == "muon":
        scale = optax.contrib.muon(
            -1.0,  # a descent of its own, which the rate below would turn round
            mu_dtype=dtype,
            eps=config.eps,
            adam_b1=config.b1,
            adam_b2=config.b2,
            muon_weight_dimension_numbers=_orthogonal,
        )
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        scale,
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(_schedule(config)),
    )


def decayed(params: base.Params) -> base.Params:
    """Say which leaves weight decay shrinks: matrices, the embedding (tied or not) left out.

    Vectors are the norms and the biases. A head of its own decays.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, p: p.ndim >= 2 and path[0].key != "embed", params
    )


def _orthogonal(params: base.Params) -> base.Params:
    """Say which axes of a leaf Muon's matrix has: inputs by outputs; None leaves it to Adam."""
    axes = optax.contrib.MuonDimensionNumbers(0, 1)
    return jax.tree_util.tree_map_with_path(
        lambda path, p: axes if p.ndim == 2 and path[0].key not in ("embed", "head") else None,
        params,
    )


def learning_rate(config: OptimConfig, opt_state: Any) -> Float[Array, ""]:
    """Compute the rate of the next update; skipped updates do not count.

    Linear warm-up from rate / warmup_steps to the rate, then constant, or a line or half a
    cosine to 0 at `decay_steps`.
    """
    return jnp.asarray(_schedule(config)(updates(opt_state)), jnp.float32)


def updates(opt_state: Any) -> Int[Array, ""]:
    """Count the updates that were applied."""
    return opt_state[-1].count  # of the schedule, last in the chain


def norms_by_part(grads: base.Params) -> dict[str, Float[Array, ""]]:
    """Compute the norm of each part of a policy's gradients; their squares add up to the whole's.

    Parts: `embed` (both uses, where the head is tied to it), `head`, `attention` and `mlp` with
    all that lies within them, and `norms`, those between.
    """
    squares = {}
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        names = [entry.key for entry in path]
        part = next((part for name, part in _PARTS.items() if name in names), "norms")
        squares[part] = squares.get(part, 0) + jnp.sum(jnp.square(grad))
    return {part: jnp.sqrt(total) for part, total in squares.items()}


_PARTS = {"embed": "embed", "head": "head", "attn": "attention", "mlp": "mlp"}


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


def _schedule(config: OptimConfig) -> optax.Schedule:
    rate, warm = config.learning_rate, config.warmup_steps
    rest = config.decay_steps - warm
    after = optax.constant_schedule(rate)
    if config.schedule == "linear":
        after = optax.linear_schedule(rate, 0.0, rest)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(rate, rest)
    if not warm:
        return after
    before = optax.linear_schedule(rate / warm, rate, max(warm - 1, 1))
    return optax.join_schedules([before, after], [warm])
