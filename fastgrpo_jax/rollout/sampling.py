"""Addressed randomness and exact sampling.

The token at a place of a sequence is argmax(filter(logits / T) + G), where the Gumbel noise
G is a pure function of (seed, step, prompt's place, sample, index in the sequence, token
id). No state is carried, so neither batch, drafter nor order can change a token, and a
drafter can look at the very noise the target will use.

Speed on CPU decides the form: a fused generator inside an argmax runs scalar and costs as
much as a small model, while materialised noise and a blocked maximum cost a hundredth.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, UInt

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_BLOCK = 128  # columns of the blocked maximum; a row of V falls into V / 128 block maxima


def threefry(key0, key1, x0, x1):
    """Hash the counter words (x0, x1) with Threefry-2x32-20 (Salmon et al. 2011).

    Written out rather than called from the library so that XLA fuses it with what follows.
    Equal to `jax.extend.random.threefry_2x32`, element by element.
    """
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << jnp.uint32(r)) | (x1 >> jnp.uint32(32 - r)))
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


def row_keys(
    seed: int, step: int, places: Integer[np.ndarray, " N"], samples: Integer[np.ndarray, " N"]
) -> UInt[Array, "N 2"]:
    """Derive each row's key from its address; places may need 64 bits, seeds too."""

    def word(x):
        return jnp.asarray(np.asarray(x, np.uint64) & np.uint64(0xFFFFFFFF), jnp.uint32)

    def high(x):
        return word(np.asarray(x, np.uint64) >> np.uint64(32))

    seed = np.uint64(seed % 2**64)
    k = threefry(word(seed), high(seed), word(step), high(step))
    k = threefry(*k, word(places), high(places))
    k = threefry(*k, word(samples), jnp.uint32(0))
    return jnp.stack(k, axis=-1)


def gumbel(
    key: UInt[Array, "*b 2"], position: Int[Array, "*b"], ids: Int[Array, " V"]
) -> Float[Array, "*b V"]:
    """Compute the noise of the given token ids at one place of each row, float32.

    -log(-log1p(-v)) with v = (bits + 1/2) / 2^32 uniform in (0, 1): v near 0, which float32
    resolves finely, is the upper tail, so that rare tokens keep their probability down to 2^-33.
    """
    bits, _ = threefry(
        key[..., 0, None],
        key[..., 1, None],
        ids.astype(jnp.uint32),
        position[..., None].astype(jnp.uint32),
    )
    v = bits.astype(jnp.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    v = jnp.minimum(v, np.float32(1 - 2.0**-24))  # the largest v would round to 1
    return -jnp.log(-jnp.log1p(-v))


def stream(key: UInt[Array, "*b 2"], number: int) -> UInt[Array, "*b 2"]:
    """Derive a key whose noise is independent of the key's own and of other streams'."""
    zero = jnp.uint32(0)
    return jnp.stack(threefry(key[..., 0], key[..., 1], jnp.uint32(number), ~zero), axis=-1)


def uniform(key: UInt[Array, "*b 2"], position: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """Draw one number in [0, 1) for each place, float32."""
    bits, _ = threefry(key[..., 0], key[..., 1], jnp.uint32(0), position.astype(jnp.uint32))
    return (bits >> jnp.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)


def top(x: Float[Array, "*b V"], k: int) -> tuple[Float[Array, "*b k"], Int[Array, "*b k"]]:
    """Find the k largest entries and their ids, the lower id first where they tie.

    The k largest lie in the k blocks with the largest maxima: 10 times faster on CPU than
    `lax.top_k` over the whole row.
    """
    x = jax.lax.optimization_barrier(x)  # else the second look may recompute x, rounded anew
    vocab = x.shape[-1]
    blocks = -(-vocab // _BLOCK)
    if blocks <= k:
        values, ids = jax.lax.top_k(x, k)
        return values, ids.astype(jnp.int32)
    pad = [(0, 0)] * (x.ndim - 1) + [(0, blocks * _BLOCK - vocab)]
    grid = jnp.pad(x, pad, constant_values=-jnp.inf).reshape(*x.shape[:-1], blocks, _BLOCK)
    _, best = jax.lax.top_k(grid.max(axis=-1), k)
    best = jnp.sort(best, axis=-1)  # so that position order is id order, for ties
    near = jnp.take_along_axis(grid, best[..., None], axis=-2).reshape(*x.shape[:-1], k * _BLOCK)
    values, at = jax.lax.top_k(near, k)
    ids = jnp.take_along_axis(best, at // _BLOCK, axis=-1) * _BLOCK + at % _BLOCK
    return values, ids.astype(jnp.int32)


def divisor(temperature: Float[Array, "*b"], dtype) -> Float[Array, "*b"]:
    """Return what logits are divided by: the temperature, or 1 where it is 0 (greedy)."""
    return jnp.where(temperature > 0, temperature, 1).astype(dtype)


def perturb(
    logits: Float[Array, "*b V"], noise: Float[Array, "*#b V"], temperature: Float[Array, "*#b"]
) -> Float[Array, "*b V"]:
    """Compute logits / T + G; the noise is cast to the logits' dtype, and is 0 where T is 0."""
    scaled = logits / divisor(temperature, logits.dtype)[..., None]
    return scaled + jnp.where(temperature[..., None] > 0, noise.astype(logits.dtype), 0)


def _ordered(x):
    """Map floats to integers of the same order; -0 and 0 to the same one."""
    x = jnp.where(x == 0, 0, x)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"int{x.dtype.itemsize * 8}"))
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _largest_threshold(keys, enough):
    """Find, per row, the largest integer t for which `enough(keys >= t)` holds, by bisection.

    `enough` must hold for t = min and can only turn false as t grows. 32 (64) masked sums of
    a row replace its sort.
    """
    info = jnp.iinfo(keys.dtype)
    low = jnp.full(keys.shape[:-1], info.min, keys.dtype)
    high = jnp.full(keys.shape[:-1], info.max, keys.dtype)

    def halve(_, bounds):
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # floor of the mean without overflow
        middle = middle + ((low ^ high) & 1)  # its ceiling
        ok = enough(keys >= middle[..., None])
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    return jax.lax.fori_loop(0, info.bits, halve, (low, high))[0]


def kept(
    scaled: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """Mark the ids that top-k and then top-p keep; ties with the last one are all kept.

    top-p acts on what top-k left, renormalised, and keeps the smallest set of likeliest ids
    whose mass reaches p (Holtzman et al. 2020). top_k 0 and top_p 1 are off.
    """
    keys = _ordered(scaled)
    k = jnp.where(top_k > 0, top_k, scaled.shape[-1])
    count = _largest_threshold(keys, lambda m: m.sum(-1, dtype=jnp.int32) >= k)
    weight = jnp.exp(scaled - scaled.max(-1, keepdims=True))
    weight = jnp.where(keys >= count[:, None], weight, 0)
    goal = top_p.astype(weight.dtype) * weight.sum(-1)
    mass = _largest_threshold(keys, lambda m: jnp.where(m, weight, 0).sum(-1) >= goal)
    cut = jnp.where(top_p < 1, mass, count)
    return keys >= cut[:, None]


class Filtered(NamedTuple):
    """The distribution that a token is drawn from.

    scaled: logits / T. inside: the same, -inf where a filter leaves the id out.
    total: log sum exp of `scaled`. mass: log of the share of it that the filters kept.
    """

    scaled: Float[Array, "B V"]
    inside: Float[Array, "B V"]
    total: Float[Array, " B"]
    mass: Float[Array, " B"]


def filtered(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
) -> Filtered:
    """Scale and filter logits. Filters cost nothing in a batch that has none."""
    scaled = logits / divisor(temperature, logits.dtype)[:, None]
    total = jax.nn.logsumexp(scaled, axis=-1)

    def cut():
        inside = jnp.where(kept(scaled, top_k, top_p), scaled, -jnp.inf)
        return inside, jax.nn.logsumexp(inside, axis=-1) - total

    unfiltered = jnp.all((top_k <= 0) & (top_p >= 1))
    inside, mass = jax.lax.cond(unfiltered, lambda: (scaled, jnp.zeros_like(total)), cut)
    return Filtered(scaled, inside, total, mass)


def probabilities(
    scaled: Float[Array, "B V"], temperature: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Compute softmax(scaled); at temperature 0 all of it is on the largest."""
    best = top(scaled, 1)[1]
    greedy = jnp.arange(scaled.shape[-1]) == best
    return jnp.where(temperature[:, None] > 0, jax.nn.softmax(scaled, axis=-1), greedy)


def recorded(
    found: Filtered, token: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Return a token's unfiltered log-prob at T, and the log of the kept mass."""
    logp = jnp.take_along_axis(found.scaled, token[:, None], axis=-1)[:, 0] - found.total
    return logp.astype(jnp.float32), found.mass.astype(jnp.float32)


def draw(
    logits: Float[Array, "B V"],
    noise: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Draw one token per row: its id, its unfiltered log-prob at T, the log of the kept mass."""
    found = filtered(logits, temperature, top_k, top_p)
    noise = jnp.where(temperature[:, None] > 0, noise.astype(logits.dtype), 0)
    token = top(found.inside + noise, 1)[1][:, 0]
    return token, *recorded(found, token)
