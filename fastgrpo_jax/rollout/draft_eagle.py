"""The learned drafter at work: its state per row, drafting a tree, learning what was accepted.

Pair t joins the target's feature f_t with the token x_{t+1}; the drafter's output at pair t
speaks of x_{t+2}. True features are stored at every round, whoever drafted it, so that the
drafter can be switched on at any time: `feed` then catches up in chunks. Only true features
and emitted tokens ever stay in the cache; what drafting writes beyond them is scratch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fastgrpo_jax import base
from fastgrpo_jax.models import cache as cache_lib
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.rollout import sampling, tree

_WORST = -1e9  # score of a draft that is not a number: last in every order, and still ordered


class EagleState(NamedTuple):
    """The learned drafter's memory of each row.

    features: what is read of the target at each position, true up to the last verified one.
    fed: pairs in the cache; the row is ready to draft when it is length - 1.
    feature, hidden: outputs at the last fed pair, which speak of the row's next token.
    """

    cache: base.KVCache
    features: Float[Array, "B S F"]
    fed: Int[Array, " B"]
    feature: Float[Array, "B E"]
    hidden: Float[Array, "B E"]


class Weights(NamedTuple):
    """The drafter's own parameters with the target's frozen embedding and head.

    ids: the draft vocabulary, ascending, whose rows `head` has; None for all ids.
    """

    params: base.Params
    embed: Float[Array, "V E"]
    head: Float[Array, "W E"]
    ids: Int[Array, " W"] | None = None


def init(config: base.EagleConfig, rows: int, slots: int) -> EagleState:
    """Make the state of rows that know nothing yet."""
    dtype = jnp.dtype(config.dtype)
    return EagleState(
        cache=eagle.new_cache(config, rows, slots),
        features=jnp.zeros((rows, slots, config.reads), dtype),
        fed=jnp.zeros(rows, jnp.int32),
        feature=jnp.zeros((rows, config.hidden), dtype),
        hidden=jnp.zeros((rows, config.hidden), dtype),
    )


def store(
    state: EagleState, features: Float[Array, "B T F"], start: Int[Array, " B"]
) -> EagleState:
    """Keep true features of T positions from `start` on."""
    kept = cache_lib.write(state.features[:, None], features[:, None], start)
    return state._replace(features=kept[:, 0])


def feed(
    config: base.EagleConfig,
    weights: Weights,
    state: EagleState,
    tokens: Int[Array, "B C"],
    ready: Int[Array, " B"],
) -> EagleState:
    """Run the drafter on the next C pairs of each row, of which those below `ready` count.

    tokens[:, i] is x_{fed + 1 + i}. Rows that have no pair left keep their state.
    """
    chunk = tokens.shape[1]
    slots = state.features.shape[1]
    place = state.fed[:, None] + jnp.arange(chunk, dtype=jnp.int32)
    features = jnp.take_along_axis(state.features, jnp.minimum(place, slots - 1)[..., None], axis=1)
    mask = jnp.arange(slots) <= place[..., None]
    feature, hidden, cache = eagle.Eagle(config).apply(
        {"params": weights.params},
        features,
        policy.embed(weights.embed, tokens, features.dtype),
        place,
        mask,
        state.cache,
        state.fed,
    )
    count = jnp.clip(ready - state.fed, 0, chunk)
    last = jnp.maximum(count - 1, 0)[:, None, None]

    def latest(new, old):
        return jnp.where((count > 0)[:, None], jnp.take_along_axis(new, last, axis=1)[:, 0], old)

    return state._replace(
        cache=cache,
        fed=state.fed + count,
        feature=latest(feature, state.feature),
        hidden=latest(hidden, state.hidden),
    )


class Drafted(NamedTuple):
    """A drafted tree, and what it left behind.

    scores: log of the estimated acceptance of each node of a chain, of all before it included.
    said: logits that each level's first node drafted from, which in a chain are all.
    state: the memory with scratch beyond its last fed pair. To go on from it, not from the one
      before, lets the cache be written in place.
    """

    tree: base.DraftTree
    scores: Float[Array, "B C"]
    said: Float[Array, "B D W"]
    state: EagleState


class _Level(NamedTuple):
    """Nodes that one draft step expands (w of them) and what the drafter said of each."""

    feature: Float[Array, "B w E"]
    hidden: Float[Array, "B w E"]
    score: Float[Array, "B w"]
    index: Int[Array, "B w"]  # in the pool of candidates; -1 is the root


def _children(weights, level, noise, temperature, tau, shared, width):
    """Rank each node's next tokens: the best `width` ids, the log of their acceptance, the logits.

    Under shared noise the order is that of log q + G, with the noise the target will use, and
    a child's chance is softmax((log q + G) / tau); otherwise both come from q itself.
    """
    said = logits = policy.logits(level.hidden, weights.head)
    if shared:
        if weights.ids is not None:
            noise = jnp.take(noise, weights.ids, axis=1)
        logits = sampling.perturb(logits, noise[:, None], temperature[:, None]) / tau
    logits = jnp.where(jnp.isfinite(logits), logits, _WORST).astype(jnp.float32)
    values, ids = sampling.top(logits, width)
    if weights.ids is not None:
        ids = weights.ids[ids]
    chance = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return ids, level.score[..., None] + chance, said


def propose(
    config: base.EagleConfig,
    weights: Weights,
    state: EagleState,
    root: Int[Array, " B"],
    noise: Float[Array, "B D1 V"],
    temperature: Float[Array, " B"],
    tau: Float[Array, ""],
    strategy: base.DraftStrategy,
    shared: bool,
) -> Drafted:
    """Draft a tree as EAGLE-2 does (arXiv 2406.16858), or its shared-noise form.

    Each level expands the `width` best nodes of the one above by the product of estimated
    acceptances; of all candidates the best `nodes - 1` are kept.
    """
    width, depth, slots = strategy.width, strategy.depth, state.features.shape[1]
    level = _Level(
        state.feature[:, None],
        state.hidden[:, None],
        jnp.zeros((root.shape[0], 1), jnp.float32),
        jnp.full((root.shape[0], 1), -1, jnp.int32),
    )
    cache, pool_size, pool, said = state.cache, 0, [], []
    prefix = jnp.arange(slots) < state.fed[:, None, None]  # [B, 1, S]
    seen = jnp.zeros((root.shape[0], 1, slots), bool)  # scratch slots of each node's ancestors
    for d in range(depth):
        ids, scores, logits = _children(
            weights, level, noise[:, d], temperature, tau, shared, width
        )  # [B, w, K]
        said.append(logits[:, 0])
        above = jnp.repeat(level.index, width, axis=1)
        ids, scores = (x.reshape(root.shape[0], -1) for x in (ids, scores))
        pool.append((ids, scores, above))
        if d + 1 == depth:
            break
        score, best = jax.lax.top_k(scores, width)
        origin = (best // width)[..., None]  # which node of this level it hangs under
        tokens = jnp.take_along_axis(ids, best, axis=1)
        scratch = state.fed + d * width
        own = jnp.arange(slots) == (scratch[:, None] + jnp.arange(width))[..., None]
        seen = jnp.take_along_axis(seen, origin, axis=1) | own
        feature, hidden, cache = eagle.Eagle(config).apply(
            {"params": weights.params},
            jnp.take_along_axis(level.feature, origin, axis=1),
            policy.embed(weights.embed, tokens, level.feature.dtype),
            jnp.broadcast_to((state.fed + d)[:, None], tokens.shape),
            prefix | seen,
            cache,
            scratch,
        )
        level = _Level(feature, hidden, score, (best + pool_size).astype(jnp.int32))
        pool_size += ids.shape[1]
    tokens, scores, parent = (jnp.concatenate(x, axis=1) for x in zip(*pool))
    if strategy.chain:
        made = tree.chain(root, tokens)
    else:
        made = tree.prune(root, tokens, scores, parent, strategy.nodes - 1)
    return Drafted(made, scores, jnp.stack(said, axis=1), state._replace(cache=cache))
