"""The training forwards: the policy over rows, and the drafter over its features."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fastgrpo_jax import base, sharding, spmd
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.train import layout
from fastgrpo_jax.train.layout import Places, Rows, StepBatch


@dataclasses.dataclass(frozen=True)
class Frame:
    """How the sequences of a batch are put into the rows of a forward, statically.

    Attributes:
      group: sequences that follow one another and share a prompt.
      max_prompt: most prompt tokens; 0 allows any that leaves room for a response.
      max_response: most response tokens.
    """

    policy: base.PolicyConfig
    group: int
    max_prompt: int
    max_response: int

    def width(self, batch: StepBatch) -> int:
        """Count the places that a row has for its prompt."""
        span = batch.tokens.shape[1]
        return min(self.max_prompt or span - 1, span)

    def responses(self, batch: StepBatch) -> int:
        """Count the sequences of a row."""
        count, span = batch.tokens.shape
        if count % (self.group * sharding.shards(self.policy.mesh)):
            return 1  # a micro-batch or a device whose rows cut groups apart
        return layout.responses_per_row(
            self.policy, self.group, self.width(batch), min(self.max_response, span)
        )

    def rows(self, batch: StepBatch, places: Places) -> Rows:
        """Lay the sequences out, padded to these limits."""
        return layout.padded(batch, places, self.width(batch), self.responses(batch))


def read(
    config: base.PolicyConfig,
    params: base.Params,
    rows: Rows,
    remat: str = "none",
    taps: tuple[int, ...] = (),
    adapters: base.Params = None,
) -> tuple[Float[Array, "A X F"], Float[Array, "A S E"]]:
    """Run the policy's body; returns what a drafter reads, and the features that response tokens
    are predicted from.

    adapters: of LoRA, scaled; they act beside the kernels.
    """
    body = policy.Policy(config, remat, taps)
    variables = {"params": params} | ({} if adapters is None else {"lora": adapters})
    found = body.apply(variables, rows.tokens, rows.positions, rows.mask)
    return found.tapped, layout.take(found.features, rows.before)


class Drafts(NamedTuple):
    """What the drafter says of each response token, at each of J unrolled steps.

    next_feature: of the feature that predicts the token.
    hidden: the head of it is the distribution of the token.
    """

    next_feature: Float[Array, "A S J E"]
    hidden: Float[Array, "A S J E"]


def draft(
    config: base.EagleConfig,
    drafter: base.Params,
    embed: Float[Array, "V E"],
    features: Float[Array, "A X F"],
    rows: Rows,
    unroll: int = 1,
    mesh: Any = None,
) -> Drafts:
    """Run the drafter over all pairs of true features, then over its own estimates.

    Pair t is (f_t, embedding of x_{t+1}) and lies where x_{t+1} lies, at position t; so the first
    place of a prompt has none. The token at position i is drafted from pair i - 2, the one before
    the pair that ends in it.

    At unrolled step j (training-time test, EAGLE-3, arXiv 2503.01840) pair t holds the estimate
    of f_t that step j - 1 made from pair t - 1. As in drafting it sees the true pairs up to
    t - j and, of the pairs between, those of its own path. No gradient reaches the policy.
    """
    drafter = spmd.gathered(mesh, drafter)
    embed = spmd.gathered(mesh, {"embed": embed})["embed"]
    count, length = rows.tokens.shape
    embeds = policy.embed(embed, rows.tokens, features.dtype)
    pairs, embeds = jax.lax.stop_gradient((_at(features, rows.previous), embeds))
    pairs, embeds = spmd.rows(mesh, (pairs, embeds))
    positions = jnp.maximum(rows.positions - 1, 0)
    true = rows.mask & (rows.previous >= 0)[:, None]
    back = [jnp.broadcast_to(jnp.arange(length), rows.previous.shape)]  # of j places before
    cache, found = None, []
    for j in range(unroll):
        if unroll > 1:
            room = eagle.new_cache(config, count, length)
            cache = jax.tree.map(_joined, cache, room) if j else room
        start = jnp.full(count, j * length, jnp.int32)
        next_feature, hidden, cache = eagle.Eagle(config).apply(
            {"params": drafter}, pairs, embeds, positions, _seen(true, back), cache, start
        )
        found.append((next_feature, hidden))
        pairs = _at(next_feature, rows.previous)
        back.append(jnp.where(back[-1] < 0, -1, _at(rows.previous, back[-1])))
    taken = [[layout.take(x, rows.before) for x in both] for both in found]
    return Drafts(*(jnp.stack(x, axis=2) for x in zip(*taken)))


def _seen(mask, back: list[Int[Array, "A X"]]):
    """Build what step j sees, j being the last of `back`: [A, X, (j + 1) X]."""
    true, *path = back[::-1]  # j places before, j - 1, ..., 0
    if not path:
        return mask
    blocks = [_at(mask, true) & (true >= 0)[..., None]]
    blocks += [place[..., None] == jnp.arange(mask.shape[-1]) for place in path]
    return jnp.concatenate(blocks, axis=-1)


def _joined(old: Float[Array, "A h S D"], room: Float[Array, "A h X D"]):
    return jnp.concatenate([old, room], axis=2)


def _at(x, place: Int[Array, "A X"]):
    """Take a place of each row for each place; -1 takes the first."""
    place = jnp.maximum(place, 0)
    return jnp.take_along_axis(x, place[..., None] if x.ndim > 2 else place, axis=1)


def drafted(rows: Rows, unroll: int) -> Bool[Array, "A S J"]:
    """Say which response tokens step j has drafts of: those with a true pair to start from."""
    spots = rows.sequence.shape[1]
    enough = rows.positions[:, -spots:, None] >= 2 + jnp.arange(unroll)
    return enough & (rows.sequence >= 0)[..., None]


def unrolled_weights(places: Places, unroll: int) -> Float[Array, "N R J"]:
    """Weigh the drafts of each response token: 0 where there is none."""
    enough = places.position[..., None] >= 2 + jnp.arange(unroll)
    return jnp.where(enough, places.drafter_weights[..., None], 0)
