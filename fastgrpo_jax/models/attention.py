"""Attention of grouped queries over slots under a mask: by XLA, or fused in one Pallas kernel.

XLA's form writes the scores of all queries to memory and reads them again for the softmax and
for the sum over values, about four passes over [M, S] floats, M being the queries that share a
key head: T tokens times Q / K heads. Keys and values are read once either way, 2 H elements a
slot. So the kernel pays where 16 M bytes are much beside them: in the verification of trees, in
prefill and in training, and hardly in plain decoding of a few grouped queries. `pays` says so.
On CPU the kernel is only interpreted, for tests.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float

from fastgrpo_jax import base, spmd

KERNELS = ("xla", "tpu", "gpu", "interpret")  # the last runs the fused one step by step, for tests
SETTINGS = ("auto", "xla", "fused")
_BLOCK = 128  # slots that the kernel looks at together
_TILE = 64  # queries of one program, at most: on an H100 128 of float32 would not fit
_MOST_BYTES = 4 << 20  # of a head's keys and values, which a TPU core keeps on chip


def attend(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
    kernel: str = "xla",
    mesh: Any = None,
) -> Float[Array, "B T Q*H"]:
    """Attend with grouped queries; a query sees the slots where its mask is True.

    A query that sees none gives numbers without a meaning. Scores and softmax are in float32 or
    wider. `kernel` is one of KERNELS; the fused one is used where it can be and `pays`; under a
    mesh each device runs it on its own rows and heads.
    """
    rows, tokens, heads, dim = q.shape
    kv = k.shape[1]
    q = q.reshape(rows, tokens, kv, heads // kv, dim).swapaxes(1, 2).reshape(rows, kv, -1, dim)
    q, k, v = (spmd.heads(mesh, x) for x in (q, k, v))
    mask = jnp.repeat(mask, heads // kv, axis=1)
    if kernel != "xla" and pays(q, k):
        fused = functools.partial(_fused, kernel)
        out = spmd.by_heads(mesh, fused, (q, k, v), mask)
    else:
        out = plain_heads(q, k, v, mask)
    return out.reshape(rows, kv, tokens, -1).swapaxes(1, 2).reshape(rows, tokens, heads * dim)


def kernel_for(setting: str, backend: str) -> str:
    """Choose one of KERNELS for a device: the fused one on accelerators, unless told otherwise.

    Raises:
      UserError: for an unknown setting, or `fused` on a device without a kernel.
    """
    if setting not in SETTINGS:
        raise base.UserError(f"model.attention is {setting!r}; allowed: {', '.join(SETTINGS)}")
    if setting == "xla" or (setting == "auto" and backend not in KERNELS):
        return "xla"
    if backend not in KERNELS:
        raise base.UserError(
            f"model.attention is 'fused', but the devices here are {backend}; allowed: auto, xla"
        )
    return backend


def pays(q, k) -> bool:
    """Say whether the kernel can take these shapes, and saves a fifth of the bytes or more."""
    slots, dim = k.shape[2:]
    fits = slots % _BLOCK == 0 and dim in (64, 128, 256) and q.dtype != jnp.float64
    fits &= 2 * slots * dim * k.dtype.itemsize <= _MOST_BYTES
    return fits and 16 * q.shape[2] >= 0.2 * 2 * dim * k.dtype.itemsize


def plain_heads(
    q: Float[Array, "B K M H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B M S"],
) -> Float[Array, "B K M H"]:
    """Attend by XLA."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = (jnp.einsum("bkmh,bksh->bkms", q, k) * q.shape[-1] ** -0.5).astype(wide)
    scores = jnp.where(mask[:, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bkms,bksh->bkmh", weights.astype(v.dtype), v)


def _fused(kernel, q, k, v, mask):
    return fused_heads(q, k, v, mask, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def fused_heads(
    q: Float[Array, "B K M H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B M S"],
    kernel: str,
) -> Float[Array, "B K M H"]:
    """Attend in one Pallas kernel with a running softmax (Milakov and Gimelshein 2018, Dao et al. 2022).

    Gradients are those of `plain_heads`, whose scores are then made again.
    """
    return _call(q, k, v, mask, kernel)


def _call(q, k, v, mask, kernel):
    rows, kv, queries, dim = q.shape
    slots = k.shape[2]
    tile = min(_TILE, 1 << max(queries - 1, 31).bit_length())  # 32 at least, a power of two
    short = -queries % tile
    q = jnp.pad(q, [(0, 0), (0, 0), (0, short), (0, 0)])
    seen = jnp.pad(mask.astype(jnp.int8), [(0, 0), (0, short), (0, 0)])
    whole = pl.BlockSpec((None, None, slots, dim), lambda b, h, i: (b, h, 0, 0))
    some = pl.BlockSpec((None, None, tile, dim), lambda b, h, i: (b, h, i, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, dim**-0.5),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(rows, kv, (queries + short) // tile),
        in_specs=[some, whole, whole, pl.BlockSpec((None, tile, slots), lambda b, h, i: (b, i, 0))],
        out_specs=some,
        interpret=kernel == "interpret",
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1)
        if kernel == "gpu"
        else None,
    )(q, k, v, seen)
    return out[:, :, :queries]


def _kernel(scale, q_ref, k_ref, v_ref, seen_ref, out_ref):
    q = q_ref[...]
    queries, dim = q.shape
    exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def step(i, carry):
        best, total, mixed = carry
        at = pl.ds(pl.multiple_of(i * _BLOCK, _BLOCK), _BLOCK)
        k, v, seen = k_ref[at, :], v_ref[at, :], seen_ref[:, at]
        scores = jax.lax.dot_general(
            q, k, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
        )
        scores = jnp.where(seen.astype(jnp.int32) != 0, scores * scale, -1e30)
        new = jnp.maximum(best, scores.max(axis=1, keepdims=True))
        weights, fade = jnp.exp(scores - new), jnp.exp(best - new)
        added = jax.lax.dot_general(
            weights.astype(v.dtype), v, (((1,), (0,)), ((), ())),
            precision=exact, preferred_element_type=jnp.float32,
        )  # fmt: skip
        return new, total * fade + weights.sum(axis=1, keepdims=True), mixed * fade + added

    start = (
        jnp.full((queries, 1), -2e30, jnp.float32),
        jnp.zeros((queries, 1), jnp.float32),
        jnp.zeros((queries, dim), jnp.float32),
    )
    _, total, mixed = jax.lax.fori_loop(0, k_ref.shape[0] // _BLOCK, step, start)
    out_ref[...] = (mixed / total).astype(out_ref.dtype)


def _forward(q, k, v, mask, kernel):
    return _call(q, k, v, mask, kernel), (q, k, v, mask)


def _backward(kernel, kept, change):
    *inputs, mask = kept
    _, pull = jax.vjp(lambda q, k, v: plain_heads(q, k, v, mask), *inputs)
    return *pull(change), None


fused_heads.defvjp(_forward, _backward)
