"""The compiled programs of a rollout: prefill, start, decode block, resize, and the probes.

This is one of the files with jit. A decode block is a `while_loop` of speculative rounds for one
(Bucket, DraftStrategy). It returns to the host when enough rows finished for a smaller bucket,
when a row needs more slots, or after R rounds.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fastgrpo_jax import base, sharding, spmd
from fastgrpo_jax.models import cache as cache_lib
from fastgrpo_jax.models import policy
from fastgrpo_jax.rollout import draft_eagle, draft_vocab, probe, speculate


def with_draft_vocab(
    weights: speculate.Weights, ids: Int[Any, " W"], mesh: Any = None
) -> speculate.Weights:
    """Restrict the learned drafter to some ids, ascending; their head is gathered once."""
    ids = sharding.put(mesh, jnp.asarray(ids, jnp.int32))
    head = _take(policy.head_table(weights.policy), ids, mesh)
    return weights._replace(draft_ids=ids, draft_head=head)


def _take_head(table, ids, mesh):
    return spmd.whole(mesh, draft_vocab.head(table, ids))


_take = jax.jit(_take_head, static_argnums=2)


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
        view = speculate.look(state, settings)
        fits = jnp.max(jnp.where(view.live, view.length, 0)) - 1 + strategy.span <= slots
        return (n < rounds) & (view.live.sum() > shrink_to) & fits

    def one(carry):
        n, counts, state = carry
        state, new = speculate.one_round(spec, strategy, weights, settings, stop_tokens, state)
        counts = jax.tree.map(jnp.add, counts, spmd.whole(mesh, new))
        return n + 1, counts, spmd.rollout(mesh, state)

    mesh = spec.policy.mesh
    n, counts, state = jax.lax.while_loop(go_on, one, (zero, counts, state))
    s = state.sequences
    report = base.BlockReport(n, *counts, s.length, s.done)
    return spmd.rollout(mesh, state), spmd.whole(mesh, report)


decode_block = jax.jit(_block, static_argnums=(0, 1), donate_argnums=5)


def empty_state(spec: speculate.Spec, bucket: base.Bucket, sequences) -> base.RolloutState:
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
    mesh = spec.policy.mesh
    tokens, length = spmd.rows(mesh, (tokens, length))
    place = jnp.arange(chunk, dtype=jnp.int32)

    def go_on(carry):
        return carry[0] < jnp.max(length) - 1

    def one(carry):
        at, cache, memory = carry
        positions = jnp.broadcast_to(at + place, (rows, chunk))
        start = jnp.full(rows, at)
        read = policy.Policy(spec.policy, taps=spec.taps).apply(
            {"params": weights.policy},
            jax.lax.dynamic_slice_in_dim(tokens, at, chunk, axis=1),
            positions,
            jnp.arange(slots) <= positions[..., None],
            cache,
            start,
        )
        if memory is not None:
            memory = draft_eagle.store(memory, read.tapped, start)
            ahead = jax.lax.dynamic_slice_in_dim(tokens, at + 1, chunk, axis=1)
            memory = draft_eagle.feed(
                spec.eagle, speculate.learned(weights), memory, ahead, length - 1
            )
        return at + chunk, *spmd.seats(mesh, (read.cache, memory))

    start = (jnp.int32(0), *spmd.seats(mesh, (cache, memory)))
    _, cache, memory = jax.lax.while_loop(go_on, one, start)
    return Prompts(*spmd.seats(mesh, (cache, memory)))


prefill = jax.jit(_prefill, static_argnums=(0, 1))


def _resize(
    state: base.RolloutState, keep: Int[Array, " C"], slots: int, mesh: Any = None
) -> base.RolloutState:
    """Take the slots `keep` of a state (out of range: an empty one) and give each `slots`."""
    total = state.sequences.length.shape[0]
    taken = jnp.take(state.rows, keep, mode="fill", fill_value=total)
    state = state._replace(
        rows=taken,
        cache=cache_lib.resize(state.cache, keep, slots, mesh),
        draft=_resize_memory(state.draft, keep, slots, mesh),
    )
    return spmd.rollout(mesh, state)


def _resize_memory(memory, keep, slots, mesh):
    if memory is None:
        return None

    taken = spmd.take(mesh, memory._replace(cache=None), keep)
    features = taken.features[:, :slots]
    grow = slots - features.shape[1]
    return taken._replace(
        cache=cache_lib.resize(memory.cache, keep, slots, mesh),
        features=jnp.pad(features, ((0, 0), (0, grow), (0, 0))),
    )


resize = jax.jit(_resize, static_argnums=(2, 3))


def _start(
    prompts: tuple[Prompts, ...], sequences, rows, source, slots, mesh=None
) -> base.RolloutState:
    """Give every row its prompt's memory: row b starts from prompt source[b]."""
    joined = spmd.concatenate(mesh, prompts)
    state = base.RolloutState(
        sequences=sequences,
        rows=rows,
        cache=cache_lib.resize(joined.cache, source, slots, mesh),
        draft=_resize_memory(joined.draft, source, slots, mesh),
    )
    return spmd.rollout(mesh, state)


start = jax.jit(_start, static_argnums=(4, 5))


def _admit(
    prompts, state: base.RolloutState, keep, fresh, source, slots, mesh=None
) -> base.RolloutState:
    """Take the slots `keep` of a state, and into slots with a line in `fresh` admit that line.

    source: the prompt of each admitted line, out of range elsewhere.
    """
    old = _resize(state, keep, slots, mesh)
    new = _start(prompts, state.sequences, fresh, source, slots, mesh)
    admitted = fresh < state.sequences.length.shape[0]

    def pick(a, b):
        return jnp.where(admitted.reshape(-1, *[1] * (a.ndim - 1)), b, a)

    state = state._replace(
        rows=pick(old.rows, new.rows),
        cache=jax.tree.map(pick, old.cache, new.cache),
        draft=jax.tree.map(pick, old.draft, new.draft),
    )
    return spmd.rollout(mesh, state)


admit = jax.jit(_admit, static_argnums=(5, 6))


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
        fed = draft_eagle.feed(spec.eagle, speculate.learned(weights), memory, tokens, ready)
        return spmd.seats(mesh, fed)

    mesh = spec.policy.mesh
    fed = jax.lax.while_loop(go_on, one, state.draft)
    return spmd.rollout(mesh, state._replace(draft=fed))


activate = jax.jit(_activate, static_argnums=0, donate_argnums=2)
forward = jax.jit(probe.forward, static_argnums=0, donate_argnums=3)
draft_step = jax.jit(probe.draft_step, static_argnums=(0, 4), donate_argnums=3)
draft_head = jax.jit(probe.draft_head)
read_chain = jax.jit(probe.read_chain, static_argnums=(0, 1, 5))
compare_pairs = jax.jit(probe.compare_pairs, static_argnums=(5, 6))


def _cast(tree, dtype, mesh=None):
    """Bring weights into a rollout's dtype and layout."""
    return spmd.gathered(mesh, probe.cast(tree, dtype))


cast = jax.jit(_cast, static_argnums=(1, 2))
read = jax.jit(probe.read, static_argnums=0)
