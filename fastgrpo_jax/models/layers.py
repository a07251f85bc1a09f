"""Layers shared by the policy and the drafters.

Parameters may be stored wider than the compute dtype; each layer casts its own. Norms,
softmax and rotary angles are computed in float32 or wider, whatever the compute dtype.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fastgrpo_jax import base, spmd
from fastgrpo_jax.models.attention import attend

_init = nn.initializers.normal(0.02)


def pack(x: Array, packing: base.Packing | None) -> Array:
    """Take the tokens of a packing out of [B, M, ...], as [1, N, ...]."""
    return x if packing is None else x[packing.row, packing.node][None]


def unpack(x: Array, packing: base.Packing | None) -> Array:
    """Put tokens [1, N, ...] back as [B, M, ...]; those that were left out are anything."""
    return x if packing is None else x[0][packing.place]


def at_least_float32(dtype) -> jnp.dtype:
    """Return float32, or the dtype itself where it is wider."""
    return jnp.promote_types(dtype, jnp.float32)


class Linear(nn.Module):
    """x @ kernel (+ bias); the kernel is [in, out]. With a collection `lora`, + (x a) b."""

    features: int
    bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        kernel = self.param("kernel", _init, (x.shape[-1], self.features))
        y = x @ kernel.astype(x.dtype)
        if self.has_variable("lora", "a"):
            a, b = (self.get_variable("lora", name).astype(x.dtype) for name in ("a", "b"))
            y += (x @ a) @ b
        if self.bias:
            y += self.param("bias", nn.initializers.zeros, (self.features,)).astype(x.dtype)
        return y


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(at_least_float32(x.dtype))
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * scale.astype(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    ffn: int

    @nn.compact
    def __call__(self, x: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        gated = nn.silu(Linear(self.ffn, name="gate")(x)) * Linear(self.ffn, name="up")(x)
        return Linear(x.shape[-1], name="down")(gated)


def rope_frequencies(
    head_dim: int, theta: float, scaling: base.RopeScaling | None
) -> Float[Array, " h"]:
    """Compute the rotary frequencies of half a head (Su et al. 2021), in radians per position.

    Llama 3 divides low frequencies by `factor`, keeps high ones, and interpolates between.
    """
    freq = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return freq
    turns = scaling.original_max_positions * freq / (2 * jnp.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return freq * (keep + (1.0 - keep) / scaling.factor)


def rope_angles(
    positions: Int[Array, "B T"], freq: Float[Array, " h"], dtype
) -> tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]:
    """Compute cos and sin of position * frequency, shared by all layers of a forward."""
    angle = positions[..., None, None].astype(jnp.float32) * freq
    return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def rotate(x: Float[Array, "B T N H"], angles) -> Float[Array, "B T N H"]:
    """Rotate the pairs (i, i + H/2) of each head, as Hugging Face lays them out."""
    cos, sin = angles
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nn.Module):
    """Grouped-query attention with optional q/k/v bias and per-head q/k norm.

    `remember` maps this forward's keys and values [B, K, T, H] to all that can be seen
    [B, K, S, H]: the identity in training, a cache write in decoding. With a packing, x has the
    tokens in one line, and only the attention itself is over rows.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    kernel: str = "xla"  # see models/attention.py
    mesh: Any = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "X Y E"],
        angles,
        mask: Bool[Array, "B T S"],
        remember: Callable,
        packing: base.Packing | None = None,
    ) -> Float[Array, "X Y E"]:
        rows, tokens, width = x.shape

        def project(name: str, heads: int):
            y = Linear(heads * self.head_dim, bias=self.qkv_bias, name=name)(x)
            return y.reshape(rows, tokens, heads, self.head_dim)

        q, k, v = project("q", self.heads), project("k", self.kv_heads), project("v", self.kv_heads)
        if self.qk_norm:
            q = RMSNorm(self.norm_eps, name="q_norm")(q)
            k = RMSNorm(self.norm_eps, name="k_norm")(k)
        q, k, v = (unpack(y, packing) for y in (rotate(q, angles), rotate(k, angles), v))
        k, v = (spmd.heads(self.mesh, y.swapaxes(1, 2)) for y in (k, v))
        k, v = remember(k, v)
        out = pack(attend(q, k, v, mask, self.kernel, self.mesh), packing)
        return Linear(width, bias=self.o_bias, name="o")(out)
