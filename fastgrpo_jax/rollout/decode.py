"""The compiled programs of a rollout: prefill, start, decode block, resize.

This is one of the two files with jit. A decode block is a `while_loop` of speculative rounds
for one (Bucket, DraftStrategy); depth 0 is plain decoding, by the same code. It returns to the
host when enough rows finished for a smaller bucket, when a row needs more slots, or after R
rounds. Weights are arguments, never captured: a rollout after an update uses the new ones.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fastgrpo_jax import base
from fastgrpo_jax.models import cache as cache_lib
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.rollout import (
    accept,
    draft_eagle,
    draft_ngram,
    draft_oracle,
    draft_vocab,
    pairs,
    sampling,
    tree,
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in every program of a rollout.

    Attributes:
      group: G, rows that answer one prompt.
      shared_noise: draft with the target's own noise; otherwise the EAGLE-2 tree.
      rejection: verify by speculative sampling, chains only: the target's distribution, but not
        plain decoding's tokens.
      ngram_longest: longest suffix that the n-gram drafter matches.
      depth_max: length of the acceptance counts; no strategy is deeper.
      prefill_rows, prefill_chunk: the one canonical shape in which prompts are read.
    """

    policy: base.PolicyConfig
    eagle: base.EagleConfig | None
    group: int
    shared_noise: bool = True
    rejection: bool = False
    ngram_longest: int = 5
    depth_max: int = 8
    prefill_rows: int = 1
    prefill_chunk: int = 32


class Weights(NamedTuple):
    """Traced weights of one rollout: the policy's, and a drafter's where there is one."""

    policy: base.Params
    eagle: base.Params = None
    oracle: Any = None
    tau: Any = None  # temperature of a draft's estimated acceptance
    draft_ids: Any = None  # the draft vocabulary [W] and its head [W, E]; None: the whole
    draft_head: Any = None
    earlier: Any = None  # earlier answers to the prompts, for the n-gram drafter


def learned(weights: Weights) -> draft_eagle.Weights:
    """Join the learned drafter's parameters with the target's embedding and head."""
    table = policy.head_table(weights.policy)
    if weights.draft_ids is not None:
        table = weights.draft_head
    return draft_eagle.Weights(weights.eagle, weights.policy["embed"], table, weights.draft_ids)


def with_draft_vocab(weights: Weights, ids: Int[Any, " W"]) -> Weights:
    """Restrict the learned drafter to some ids, ascending; their head is gathered once."""
    ids = jnp.asarray(ids, jnp.int32)
    return weights._replace(draft_ids=ids, draft_head=_take(policy.head_table(weights.policy), ids))


_take = jax.jit(draft_vocab.head)


class _View(NamedTuple):
    """What a round needs to know of each live row."""

    live: Array
    length: Array
    root: Array
    settings: base.Sampling
    room: Array


def _look(state: base.RolloutState, settings: base.Sampling) -> _View:
    s = state.sequences
    row = jnp.minimum(state.rows, s.length.shape[0] - 1)
    live = (state.rows < s.length.shape[0]) & ~s.done[row]
    length = jnp.where(live, s.length[row], 1)
    root = jnp.take_along_axis(s.tokens[row], length[:, None] - 1, axis=1)[:, 0]
    room = jnp.where(live, s.limit[row] - length, 0)
    return _View(live, length, root, jax.tree.map(lambda x: x[row], settings), room)


def _propose(spec, strategy, weights, state, view, noise):
    """Draft a tree; also returns the logits of a learned chain [B, D, W], else None."""
    if strategy.depth == 0:
        return tree.chain(view.root, jnp.zeros((view.root.shape[0], 0), jnp.int32)), None
    if strategy.drafter == "ngram":
        tokens = draft_ngram.propose(
            state.sequences,
            state.rows,
            spec.group,
            strategy.depth,
            spec.ngram_longest,
            weights.earlier,
        )
        return tree.chain(view.root, tokens), None
    if strategy.drafter == "oracle":
        fan = draft_oracle.propose(
            weights.oracle, view.root, state.rows, view.length, strategy, spec.policy.vocab
        )
        return fan, None
    return draft_eagle.propose(
        spec.eagle,
        learned(weights),
        state.draft,
        view.root,
        noise,
        view.settings.temperature,
        weights.tau,
        strategy,
        spec.shared_noise,
    )


def _append(state: base.RolloutState, view: _View, verdict: base.Verdict, stopped):
    """Write emitted tokens and their log-probs; rows that are done write nothing."""
    s = state.sequences
    index = jnp.arange(verdict.tokens.shape[1])
    at = jnp.where(index < verdict.count[:, None], view.length[:, None] + index, s.tokens.shape[1])
    line = state.rows[:, None]
    length = view.length + verdict.count
    target = jnp.where(view.live, state.rows, s.length.shape[0])
    return s._replace(
        tokens=s.tokens.at[line, at].set(verdict.tokens, mode="drop"),
        logps=s.logps.at[line, at].set(verdict.logps, mode="drop"),
        masses=s.masses.at[line, at].set(verdict.masses, mode="drop"),
        length=s.length.at[target].set(length, mode="drop"),
        done=s.done.at[target].set(stopped | (verdict.count >= view.room), mode="drop"),
        stopped=s.stopped.at[target].set(stopped, mode="drop"),
    )


def _verify(spec, weights, state, view, draft, depth):
    """Run the target once over all nodes: features, the cache, and the depth of each node."""
    seen = tree.ancestors(draft.parent, depth)
    start = view.length - 1
    slots = state.cache.k[0].shape[2]
    nodes = draft.tokens.shape[1]
    offset = jnp.arange(slots) - start[:, None]  # node index that a slot holds, if any
    inside = (offset >= 0) & (offset < nodes)
    in_tree = jnp.take_along_axis(seen, jnp.clip(offset, 0, nodes - 1)[:, None], axis=2)
    mask = (offset < 0)[:, None] | (inside[:, None] & in_tree)
    features, cache = policy.Policy(spec.policy).apply(
        {"params": weights.policy},
        draft.tokens,
        start[:, None] + tree.depths(seen),
        mask,
        state.cache,
        start,
    )
    return features, cache


_DRAFTS, _COINS = 1, 2  # streams of noise beside the target's own


def _drafted_from(draft, said, draft_ids, temperature, like):
    """Build q [B, D, V]: what a learned chain was drawn from, else all on the draft itself."""
    vocab = like.shape[-1]
    if said is None:
        return jax.nn.one_hot(draft.tokens[:, 1:], vocab, dtype=like.dtype)
    scaled = said.astype(like.dtype) / sampling.divisor(temperature, like.dtype)[:, None, None]
    q = jnp.stack(
        [sampling.probabilities(scaled[:, d], temperature) for d in range(said.shape[1])], axis=1
    )
    if draft_ids is None:
        return q
    return jnp.zeros((*q.shape[:2], vocab), q.dtype).at[..., draft_ids].set(q)


def _round(spec, strategy, weights, settings, stop_tokens, state):
    """Draft, verify, accept, commit. Returns the new state and what was accepted and tried."""
    view = _look(state, settings)
    depth = strategy.depth
    ahead = view.length[:, None] + jnp.arange(depth + 1, dtype=jnp.int32)
    ids = jnp.arange(spec.policy.vocab, dtype=jnp.int32)
    keys = jnp.broadcast_to(view.settings.key[:, None], (*ahead.shape, 2))
    noise = jax.lax.optimization_barrier(sampling.gumbel(keys, ahead, ids))

    dice = noise
    if spec.rejection:  # drafts that know the target's dice would not be drafts from q
        dice = sampling.gumbel(sampling.stream(keys, _DRAFTS), ahead, ids)
    draft, said = _propose(spec, strategy, weights, state, view, dice)
    features, cache = _verify(spec, weights, state, view, draft, depth)
    logits = policy.logits(features, policy.head_table(weights.policy))
    v = view.settings

    def draw(node, d):
        here = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]
        return sampling.draw(here, noise[:, d], v.temperature, v.top_k, v.top_p)

    def weigh(d):
        found = sampling.filtered(logits[:, d], v.temperature, v.top_k, v.top_p)
        p = sampling.probabilities(found.inside, v.temperature)
        return p, lambda token: sampling.recorded(found, token)

    if spec.rejection:
        coins = sampling.uniform(sampling.stream(keys, _COINS), ahead)
        q = _drafted_from(draft, said, weights.draft_ids, v.temperature, logits)
        verdict = accept.reject(draft.tokens[:, 1:], weigh, q, coins[:, :depth], noise)
    else:
        verdict = accept.walk(draft, draw, depth)
    verdict, stopped = accept.cut(verdict, stop_tokens, view.room)
    if not (strategy.chain or depth == 0):
        cache = cache_lib.move(cache, view.length - 1, verdict.nodes)
    sequences = _append(state, view, verdict, stopped)
    memory = state.draft
    if memory is not None:
        path = jnp.take_along_axis(features, verdict.nodes[..., None], axis=1)
        memory = draft_eagle.store(memory, path, view.length - 1)
        if strategy.drafter == "learned":
            ready = jnp.where(view.live, view.length - 1 + verdict.count, 0)
            memory = draft_eagle.feed(spec.eagle, learned(weights), memory, verdict.tokens, ready)
    index = jnp.arange(spec.depth_max)
    taken = verdict.count[:, None] > index + 1
    over = stopped | (verdict.count >= view.room)
    judged = taken | ((verdict.count[:, None] == index + 1) & ~over[:, None])
    judged &= index < depth
    counts = (view.live.sum(), verdict.count.sum(), taken.sum(0), judged.sum(0))
    new = state._replace(sequences=sequences, cache=cache, draft=memory)
    return new, jax.tree.map(lambda x: x.astype(jnp.int32), counts)


def _block(spec, strategy, weights, settings, stop_tokens, state, shrink_to, rounds):
    """Run rounds until fewer than `shrink_to + 1` rows live, slots run out, or `rounds` passed."""
    slots = state.cache.k[0].shape[2]
    zero = jnp.int32(0)
    counts = (
        zero,
        zero,
        jnp.zeros(spec.depth_max, jnp.int32),
        jnp.zeros(spec.depth_max, jnp.int32),
    )

    def go_on(carry):
        n, _, state = carry
        view = _look(state, settings)
        fits = jnp.max(jnp.where(view.live, view.length, 0)) - 1 + strategy.span <= slots
        return (n < rounds) & (view.live.sum() > shrink_to) & fits

    def one(carry):
        n, counts, state = carry
        state, new = _round(spec, strategy, weights, settings, stop_tokens, state)
        return n + 1, jax.tree.map(jnp.add, counts, new), state

    n, counts, state = jax.lax.while_loop(go_on, one, (zero, counts, state))
    s = state.sequences
    return state, base.BlockReport(n, *counts, s.length, s.done)


decode_block = jax.jit(_block, static_argnums=(0, 1), donate_argnums=5)


def empty_state(spec: Spec, bucket: base.Bucket, sequences) -> base.RolloutState:
    """Make a state on which nobody sits."""
    memory = draft_eagle.init(spec.eagle, bucket.rows, bucket.slots) if spec.eagle else None
    cache = policy.new_cache(spec.policy, bucket.rows, bucket.slots)
    return base.RolloutState(sequences, jnp.zeros(bucket.rows, jnp.int32), cache, memory)


class Prompts(NamedTuple):
    """The memory of prompts that were read: each all but its last token, true to `length` - 1."""

    cache: base.KVCache
    draft: Any


def _prefill(spec, slots, weights, tokens, length):
    """Read R prompts chunk by chunk; the last token is left for the first decode round."""
    rows, chunk = tokens.shape[0], spec.prefill_chunk
    cache = policy.new_cache(spec.policy, rows, slots)
    memory = draft_eagle.init(spec.eagle, rows, slots) if spec.eagle else None
    place = jnp.arange(chunk, dtype=jnp.int32)

    def go_on(carry):
        return carry[0] < jnp.max(length) - 1

    def one(carry):
        at, cache, memory = carry
        positions = jnp.broadcast_to(at + place, (rows, chunk))
        start = jnp.full(rows, at)
        features, cache = policy.Policy(spec.policy).apply(
            {"params": weights.policy},
            jax.lax.dynamic_slice_in_dim(tokens, at, chunk, axis=1),
            positions,
            jnp.arange(slots) <= positions[..., None],
            cache,
            start,
        )
        if memory is not None:
            memory = draft_eagle.store(memory, features, start)
            ahead = jax.lax.dynamic_slice_in_dim(tokens, at + 1, chunk, axis=1)
            memory = draft_eagle.feed(spec.eagle, learned(weights), memory, ahead, length - 1)
        return at + chunk, cache, memory

    _, cache, memory = jax.lax.while_loop(go_on, one, (jnp.int32(0), cache, memory))
    return Prompts(cache, memory)


prefill = jax.jit(_prefill, static_argnums=(0, 1))


def _resize(state: base.RolloutState, keep: Int[Array, " C"], slots: int) -> base.RolloutState:
    """Take the slots `keep` of a state (out of range: an empty one) and give each `slots`."""
    total = state.sequences.length.shape[0]
    taken = jnp.take(state.rows, keep, mode="fill", fill_value=total)
    return state._replace(
        rows=taken,
        cache=cache_lib.resize(state.cache, keep, slots),
        draft=_resize_memory(state.draft, keep, slots),
    )


def _resize_memory(memory, keep, slots):
    if memory is None:
        return None

    def take(x):
        return jnp.take(x, keep, axis=0, mode="fill", fill_value=0)

    features = take(memory.features)[:, :slots]
    grow = slots - features.shape[1]
    return draft_eagle.EagleState(
        cache=cache_lib.resize(memory.cache, keep, slots),
        features=jnp.pad(features, ((0, 0), (0, grow), (0, 0))),
        fed=take(memory.fed),
        feature=take(memory.feature),
        hidden=take(memory.hidden),
    )


resize = jax.jit(_resize, static_argnums=2)


def _start(prompts: tuple[Prompts, ...], sequences, rows, source, slots) -> base.RolloutState:
    """Give every row its prompt's memory: row b starts from prompt source[b]."""
    joined = jax.tree.map(lambda *x: jnp.concatenate(x), *prompts)
    return base.RolloutState(
        sequences=sequences,
        rows=rows,
        cache=cache_lib.resize(joined.cache, source, slots),
        draft=_resize_memory(joined.draft, source, slots),
    )


start = jax.jit(_start, static_argnums=4)


def _admit(prompts, state: base.RolloutState, keep, fresh, source, slots) -> base.RolloutState:
    """Take the slots `keep` of a state, and into slots with a line in `fresh` admit that line.

    source: the prompt of each admitted line, out of range elsewhere.
    """
    old = _resize(state, keep, slots)
    new = _start(prompts, state.sequences, fresh, source, slots)
    admitted = fresh < state.sequences.length.shape[0]

    def pick(a, b):
        return jnp.where(admitted.reshape(-1, *[1] * (a.ndim - 1)), b, a)

    return state._replace(
        rows=pick(old.rows, new.rows),
        cache=jax.tree.map(pick, old.cache, new.cache),
        draft=jax.tree.map(pick, old.draft, new.draft),
    )


admit = jax.jit(_admit, static_argnums=5)


def _activate(spec, weights, state: base.RolloutState) -> base.RolloutState:
    """Feed the learned drafter the features stored while it was off, chunk by chunk."""
    s = state.sequences
    row = jnp.minimum(state.rows, s.length.shape[0] - 1)
    live = (state.rows < s.length.shape[0]) & ~s.done[row]
    ready = jnp.where(live, s.length[row] - 1, 0)
    chunk = spec.prefill_chunk

    def go_on(memory):
        return jnp.any(memory.fed < ready)

    def one(memory):
        at = memory.fed[:, None] + 1 + jnp.arange(chunk, dtype=jnp.int32)
        tokens = jnp.take_along_axis(s.tokens[row], jnp.minimum(at, s.tokens.shape[1] - 1), axis=1)
        return draft_eagle.feed(spec.eagle, learned(weights), memory, tokens, ready)

    return state._replace(draft=jax.lax.while_loop(go_on, one, state.draft))


activate = jax.jit(_activate, static_argnums=0, donate_argnums=2)


def _forward(config, params, tokens, cache):
    """Run one bare forward with its head: the unit of all costs."""
    rows, slots = tokens.shape[0], cache.k[0].shape[2]
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    features, cache = policy.Policy(config).apply(
        {"params": params},
        tokens,
        place,
        jnp.arange(slots) <= place[..., None],
        cache,
        jnp.zeros(rows, jnp.int32),
    )
    return policy.logits(features, policy.head_table(params)).max(axis=-1), cache


forward = jax.jit(_forward, static_argnums=0, donate_argnums=3)


def _draft_step(config, weights: draft_eagle.Weights, feature, cache, with_head=True):
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
    return _draft_head(weights, hidden), cache


def _draft_head(weights: draft_eagle.Weights, hidden):
    """Run the drafter's bare head."""
    return policy.logits(hidden, weights.head).max(axis=-1)


draft_step = jax.jit(_draft_step, static_argnums=(0, 4), donate_argnums=3)
draft_head = jax.jit(_draft_head)


class ChainRead(NamedTuple):
    """What policy and drafter make of known rows; hidden[d] is the drafter's at depth d + 1."""

    features: Array  # [B, T, E]
    hidden: tuple[Array, ...]  # [B, T, E] each


def _read_chain(config, head, weights: draft_eagle.Weights, params, tokens, depth) -> ChainRead:
    """Read known rows; at depth d the drafter's last d - 1 features are its own estimates.

    Pass d runs the drafter at all places at one time: its pair t holds the estimate of f_t that
    pass d - 1 made at t - 1, and sees the true pairs up to t - d + 1 and what the passes before
    it made of those between.
    """
    rows, span = tokens.shape
    place = jnp.arange(span, dtype=jnp.int32)
    causal = jnp.broadcast_to(place[:, None] >= place, (rows, span, span))
    positions = jnp.broadcast_to(place, tokens.shape)
    features, _ = policy.Policy(config).apply({"params": params}, tokens, positions, causal)
    embeds = policy.embed(weights.embed, jnp.roll(tokens, -1, axis=1), features.dtype)
    cache = eagle.new_cache(head, rows, depth * span)
    given, hidden = features, []
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
    return ChainRead(features, tuple(hidden))


read_chain = jax.jit(_read_chain, static_argnums=(0, 1, 5))


def _compare_pairs(params, target, draft, ids, temperature, widths, draws):
    table = policy.head_table(params)
    p, q = (
        jax.nn.softmax(policy.logits(x, table).astype(jnp.float32) / temperature)
        for x in (target, draft)
    )
    return pairs.compare(p, q, ids, widths, draws)


compare_pairs = jax.jit(_compare_pairs, static_argnums=(5, 6))


def _cast_tree(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


cast = jax.jit(_cast_tree, static_argnums=1)


def _read(config, params, tokens):
    """Compute the logits of whole rows [B, T, V] in one causal forward without a cache."""
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    mask = jnp.broadcast_to(place[:, None] >= place, (tokens.shape[0], place.size, place.size))
    features, _ = policy.Policy(config).apply(
        {"params": params}, tokens, jnp.broadcast_to(place, tokens.shape), mask
    )
    return policy.logits(features, policy.head_table(params))


read = jax.jit(_read, static_argnums=0)
