"""Low-rank adapters of a policy's projections (LoRA, arXiv 2106.09685).

    y = x W + (alpha / rank) (x A) B,  A [in, rank], B [rank, out]

Only A and B are trained. B starts at 0, so that the adapted policy starts as the policy itself. In
training they act beside the frozen kernels; a rollout gets kernels that they are merged into.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from fastgrpo_jax import base
from fastgrpo_jax.models import layers

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which projections are adapted, and how; see the config keys `lora.*`.

    Raises:
      base.UserError: a field is not allowed.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self):
        if not 1 <= self.rank <= 4096:
            raise base.UserError(f"lora.rank is {self.rank}; allowed: 0 (off) to 4096")
        if not 0 < self.alpha < float("inf"):
            raise base.UserError(f"lora.alpha is {self.alpha}; allowed: above 0")
        wrong = [name for name in self.targets if name not in TARGETS]
        if wrong or not self.targets or len(set(self.targets)) < len(self.targets):
            raise base.UserError(
                f"lora.targets is {','.join(self.targets)!r}; allowed: some of {','.join(TARGETS)}"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def init(key, config: LoraConfig, params: base.Params) -> base.Params:
    """Draw adapters of a policy's kernels: A uniform within 1 / sqrt(in), as PEFT does, B 0.

    They have the tree of the kernels they belong to, with leaves `a` and `b` in float32 or wider.
    """
    made = {}
    for path, kernel in _kernels(config, params).items():
        key, own = jax.random.split(key)
        wide = layers.at_least_float32(kernel.dtype)
        bound = kernel.shape[0] ** -0.5
        a = jax.random.uniform(own, (kernel.shape[0], config.rank), wide, -bound, bound)
        made[*path, "a"] = a
        made[*path, "b"] = jnp.zeros((config.rank, kernel.shape[1]), wide)
    return traverse_util.unflatten_dict(made)


def scaled(config: LoraConfig, adapters: base.Params) -> base.Params:
    """Put alpha / rank into B: the collection `lora` that a policy's layers look for."""
    flat = traverse_util.flatten_dict(adapters)
    return traverse_util.unflatten_dict(
        {path: x * config.scale if path[-1] == "b" else x for path, x in flat.items()}
    )


def merge(config: LoraConfig, params: base.Params, adapters: base.Params) -> base.Params:
    """Add the adapters to a policy's kernels, in float32 or wider; dtypes stay."""
    flat = traverse_util.flatten_dict(params)
    own = traverse_util.flatten_dict(scaled(config, adapters))
    for path, kernel in _kernels(config, params).items():
        change = own[*path, "a"] @ own[*path, "b"]
        flat[*path, "kernel"] = (kernel.astype(change.dtype) + change).astype(kernel.dtype)
    return traverse_util.unflatten_dict(flat)


def _kernels(config: LoraConfig, params: base.Params) -> dict[tuple[str, ...], Any]:
    """List the kernels that are adapted, by the path of their layer."""
    flat = traverse_util.flatten_dict(params)
    return {
        path[:-1]: x
        for path, x in sorted(flat.items())
        if path[-1] == "kernel" and path[-2] in config.targets
    }
