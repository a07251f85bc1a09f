"""One speculative round: draft, verify, accept, commit. Pure functions that `decode` compiles.

Depth 0 is plain decoding, by the same code. Weights are arguments, never captured: a rollout
after an update uses the new ones.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fastgrpo_jax import base, spmd
from fastgrpo_jax.models import cache as cache_lib
from fastgrpo_jax.models import policy
from fastgrpo_jax.rollout import (
    accept,
    draft_eagle,
    draft_ngram,
    draft_oracle,
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

    @property
    def taps(self) -> tuple[int, ...]:
        """List the policy's layers that the learned drafter reads."""
        return self.eagle.taps if self.eagle else ()


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


class View(NamedTuple):
    """What a round needs to know of each live row."""

    live: Array
    length: Array
    root: Array
    settings: base.Sampling
    room: Array


def look(state: base.RolloutState, settings: base.Sampling) -> View:
    s = state.sequences
    row = jnp.minimum(state.rows, s.length.shape[0] - 1)
    live = (state.rows < s.length.shape[0]) & ~s.done[row]
    length = jnp.where(live, s.length[row], 1)
    root = jnp.take_along_axis(s.tokens[row], length[:, None] - 1, axis=1)[:, 0]
    room = jnp.where(live, s.limit[row] - length, 0)
    return View(live, length, root, jax.tree.map(lambda x: x[row], settings), room)


class _Said(NamedTuple):
    """What a round made of its rows; tried: drafts that were verified, [B, 1] where they differ."""

    view: View
    verdict: base.Verdict
    stopped: Array
    tried: Any
    cache: base.KVCache
    memory: Any


def one_round(spec, strategy, weights, settings, stop_tokens, state):
    """Draft, verify, accept, commit. Returns the new state and what was accepted and tried.

    Under a mesh each device does so with its own rows, and hears what the others' rows said.
    """
    mesh = spec.policy.mesh

    def own(shared, mine):
        weights, settings, stop_tokens, sequences = shared
        return _say(
            spec, strategy, weights, settings, stop_tokens, base.RolloutState(sequences, *mine)
        )

    said = spmd.by_rows(
        mesh,
        own,
        (weights, settings, stop_tokens, state.sequences),
        (state.rows, state.cache, state.draft),
    )
    cache, memory = said.cache, said.memory
    view, verdict, stopped, tried = spmd.whole(mesh, said[:4])
    sequences = _append(state, view, verdict, stopped)
    index = jnp.arange(spec.depth_max)
    taken = verdict.count[:, None] > index + 1
    over = stopped | (verdict.count >= view.room)
    judged = taken | ((verdict.count[:, None] == index + 1) & ~over[:, None])
    judged &= index < tried
    counts = (view.live.sum(), verdict.count.sum(), taken.sum(0), judged.sum(0))
    new = state._replace(sequences=sequences, cache=cache, draft=memory)
    return new, jax.tree.map(lambda x: x.astype(jnp.int32), counts)


def _say(spec, strategy, weights, settings, stop_tokens, state) -> _Said:
    view = look(state, settings)
    depth = strategy.depth
    ahead = view.length[:, None] + jnp.arange(depth + 1, dtype=jnp.int32)
    ids = jnp.arange(spec.policy.vocab, dtype=jnp.int32)
    keys = jnp.broadcast_to(view.settings.key[:, None], (*ahead.shape, 2))
    noise = jax.lax.optimization_barrier(sampling.gumbel(keys, ahead, ids))

    dice = noise
    if spec.rejection:  # drafts that know the target's dice would not be drafts from q
        dice = sampling.gumbel(sampling.stream(keys, _DRAFTS), ahead, ids)
    draft, said, scores, memory = _propose(spec, strategy, weights, state, view, dice)
    packing, tried = None, jnp.full((view.root.shape[0], 1), depth)
    if strategy.share:
        draft, packing = _share(strategy, draft, scores, view)
        tried = jnp.sum(draft.tokens[:, 1:] >= 0, axis=1)[:, None]
    read = _verify(spec, weights, state, view, draft, depth, packing)
    cache = read.cache
    logits = policy.logits(read.features, policy.head_table(weights.policy))
    if spec.rejection:
        coins = sampling.uniform(sampling.stream(keys, _COINS), ahead)[:, :depth]
        q = _drafted_from(draft, said, weights.draft_ids, view.settings.temperature, logits)
        verdict = _reject(view, logits, draft, q, coins, noise)
    else:
        verdict = _walk(view, logits, draft, noise, depth, packing)
    verdict, stopped = accept.cut(verdict, stop_tokens, view.room)
    if not (strategy.chain or depth == 0):
        cache = cache_lib.move(cache, view.length - 1, verdict.nodes)
    if memory is not None:
        path = _at_nodes(read.tapped, verdict.nodes, packing)
        memory = draft_eagle.store(memory, path, view.length - 1)
        if strategy.drafter == "learned":
            ready = jnp.where(view.live, view.length - 1 + verdict.count, 0)
            memory = draft_eagle.feed(spec.eagle, learned(weights), memory, verdict.tokens, ready)
    return _Said(view, verdict, stopped, tried, cache, memory)


class _Proposal(NamedTuple):
    """A drafted tree. said: a learned drafter's logits; scores [B, D]: how sure a chain is, less
    with each level; memory: the learned drafter's afterwards."""

    tree: base.DraftTree
    said: Any
    scores: Any
    memory: Any


def _propose(spec, strategy, weights, state, view, noise) -> _Proposal:
    if strategy.depth == 0:
        nothing = jnp.zeros((view.root.shape[0], 0), jnp.int32)
        return _Proposal(tree.chain(view.root, nothing), None, None, state.draft)
    if strategy.drafter == "ngram":
        tokens, matched = draft_ngram.propose(
            state.sequences,
            state.rows,
            spec.group,
            strategy.depth,
            spec.ngram_longest,
            weights.earlier,
        )
        # Of the longest matches the most go on: m of m + 1, level by level.
        scores = (1 + jnp.arange(strategy.depth)) * jnp.log(matched / (matched + 1))[:, None]
        return _Proposal(tree.chain(view.root, tokens), None, scores, state.draft)
    if strategy.drafter == "oracle":
        fan = draft_oracle.propose(
            weights.oracle, view.root, state.rows, view.length, strategy, spec.policy.vocab
        )
        scores = jnp.broadcast_to(-jnp.arange(1.0, fan.tokens.shape[1]), fan.tokens[:, 1:].shape)
        return _Proposal(fan, None, scores, state.draft)
    drafted = draft_eagle.propose(
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
    return _Proposal(drafted.tree, drafted.said, drafted.scores, drafted.state)


def _share(strategy, draft, scores, view) -> tuple[base.DraftTree, base.Packing]:
    """Choose which nodes a bucket verifies: live rows' roots, and the likeliest of all drafts.

    Scores fall along a chain and of equals the earlier is taken, so what is kept of a row is
    the beginning of its chain; the rest becomes -1, which is never accepted. Between rows with
    equal scores the one with more left to say comes first.
    """
    rows, nodes = draft.tokens.shape
    live = view.live[:, None]
    urgent = 1e-6 * view.room[:, None] / jnp.maximum(view.room.max(), 1)
    rank = jnp.where(live & (draft.tokens[:, 1:] >= 0), scores + urgent, -jnp.inf)
    root = jnp.where(live, jnp.inf, -jnp.inf).astype(rank.dtype)
    value, best = jax.lax.top_k(
        jnp.concatenate([root, rank], axis=1).reshape(-1), strategy.total(rows)
    )
    best = best.astype(jnp.int32)
    kept = jnp.zeros(rows * nodes, bool).at[best].set(value > -jnp.inf).reshape(rows, nodes)
    place = jnp.zeros(rows * nodes, jnp.int32).at[best].set(jnp.arange(best.size, dtype=jnp.int32))
    kept = kept.at[:, 0].set(True)
    tokens = jnp.where(kept, draft.tokens, -1)
    packing = base.Packing(best // nodes, best % nodes, place.reshape(rows, nodes))
    return draft._replace(tokens=tokens), packing


def _append(state: base.RolloutState, view: View, verdict: base.Verdict, stopped):
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


def _verify(spec, weights, state, view, draft, depth, packing) -> policy.Read:
    """Run the target once over all nodes, or a packing of them."""
    seen = tree.ancestors(draft.parent, depth)
    start = view.length - 1
    slots = state.cache.k[0].shape[2]
    nodes = draft.tokens.shape[1]
    offset = jnp.arange(slots) - start[:, None]  # node index that a slot holds, if any
    inside = (offset >= 0) & (offset < nodes)
    in_tree = jnp.take_along_axis(seen, jnp.clip(offset, 0, nodes - 1)[:, None], axis=2)
    mask = (offset < 0)[:, None] | (inside[:, None] & in_tree)
    return policy.Policy(spec.policy, taps=spec.taps).apply(
        {"params": weights.policy},
        draft.tokens,
        start[:, None] + tree.depths(seen),
        mask,
        state.cache,
        start,
        packing,
    )


def _at_nodes(x, nodes, packing):
    """Take each row's values at some nodes, [B, n, ...], out of a forward's."""
    if packing is None:
        return jnp.take_along_axis(x, nodes[..., None], axis=1)
    return x[0][jnp.take_along_axis(packing.place, nodes, axis=1)]


def _walk(view: View, logits, draft, noise, depth: int, packing) -> base.Verdict:
    """Follow the draft as long as it holds the tokens that plain decoding would draw."""
    v = view.settings

    def draw(node, d):
        here = _at_nodes(logits, node[:, None], packing)[:, 0]
        return sampling.draw(here, noise[:, d], v.temperature, v.top_k, v.top_p)

    return accept.walk(draft, draw, depth)


def _reject(view: View, logits, draft, q, coins, noise) -> base.Verdict:
    """Accept a chain that was drawn from q by the usual speculative sampling."""
    v = view.settings

    def weigh(d):
        found = sampling.filtered(logits[:, d], v.temperature, v.top_k, v.top_p)
        p = sampling.probabilities(found.inside, v.temperature)
        return p, lambda token: sampling.recorded(found, token)

    return accept.reject(draft.tokens[:, 1:], weigh, q, coins, noise)


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
