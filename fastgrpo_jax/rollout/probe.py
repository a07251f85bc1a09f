"""What is measured or looked at outside of a rollout: bare forwards, whole rows read at once.

Pure functions that `decode` compiles; a bare forward is the unit of all costs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.rollout import draft_eagle, pairs


def forward(config, params, tokens, cache):
    """Run one bare forward with its head: the unit of all costs."""
    rows, slots = tokens.shape[0], cache.k[0].shape[2]
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    read = policy.Policy(config).apply(
        {"params": params},
        tokens,
        place,
        jnp.arange(slots) <= place[..., None],
        cache,
        jnp.zeros(rows, jnp.int32),
    )
    return policy.logits(read.features, policy.head_table(params)).max(axis=-1), read.cache


def draft_step(config, weights: draft_eagle.Weights, feature, cache, with_head=True):
    """Run one bare step of the drafter on some nodes of each row, with its head or without."""
    rows, slots = feature.shape[0], cache.k[0].shape[2]
    place = jnp.broadcast_to(jnp.arange(feature.shape[1], dtype=jnp.int32), feature.shape[:2])
    _, hidden, cache = eagle.Eagle(config).apply(
        {"params": weights.params},
        feature,
        policy.embed(weights.embed, place, feature.dtype),
        place,
        jnp.arange(slots) <= place[..., None],
        cache,
        jnp.zeros(rows, jnp.int32),
    )
    if not with_head:
        return hidden, cache
    return draft_head(weights, hidden), cache


def draft_head(weights: draft_eagle.Weights, hidden):
    """Run the drafter's bare head."""
    return policy.logits(hidden, weights.head).max(axis=-1)


class ChainRead(NamedTuple):
    """What policy and drafter make of known rows; hidden[d] is the drafter's at depth d + 1."""

    features: Array  # [B, T, E]
    hidden: tuple[Array, ...]  # [B, T, E] each


def read_chain(config, head, weights: draft_eagle.Weights, params, tokens, depth) -> ChainRead:
    """Read known rows; at depth d the drafter's last d - 1 features are its own estimates.

    Pass d runs the drafter at all places at one time: its pair t holds the estimate of f_t that
    pass d - 1 made at t - 1, and sees the true pairs up to t - d + 1 and what the passes before
    it made of those between.
    """
    rows, span = tokens.shape
    place = jnp.arange(span, dtype=jnp.int32)
    causal = jnp.broadcast_to(place[:, None] >= place, (rows, span, span))
    positions = jnp.broadcast_to(place, tokens.shape)
    read = policy.Policy(config, taps=head.taps).apply(
        {"params": params}, tokens, positions, causal
    )
    embeds = policy.embed(weights.embed, jnp.roll(tokens, -1, axis=1), read.features.dtype)
    cache = eagle.new_cache(head, rows, depth * span)
    given, hidden = read.tapped, []
    for d in range(depth):
        back = place[:, None] - place  # how far a pair lies behind
        seen = [back >= d] + [back == d - k for k in range(1, d + 1)]
        seen += [jnp.zeros_like(causal[0])] * (depth - d - 1)
        mask = jnp.broadcast_to(jnp.concatenate(seen, axis=1), (rows, span, depth * span))
        start = jnp.full(rows, d * span, jnp.int32)
        guess, out, cache = eagle.Eagle(head).apply(
            {"params": weights.params}, given, embeds, positions, mask, cache, start
        )
        hidden.append(out)
        given = jnp.roll(guess, 1, axis=1)
    return ChainRead(read.features, tuple(hidden))


def compare_pairs(params, target, draft, ids, temperature, widths, draws):
    table = policy.head_table(params)
    p, q = (
        jax.nn.softmax(policy.logits(x, table).astype(jnp.float32) / temperature)
        for x in (target, draft)
    )
    return pairs.compare(p, q, ids, widths, draws)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def read(config, params, tokens):
    """Compute the logits of whole rows [B, T, V] in one causal forward without a cache."""
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    mask = jnp.broadcast_to(place[:, None] >= place, (tokens.shape[0], place.size, place.size))
    read = policy.Policy(config).apply(
        {"params": params}, tokens, jnp.broadcast_to(place, tokens.shape), mask
    )
    return policy.logits(read.features, policy.head_table(params))
