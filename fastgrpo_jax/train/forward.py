"""The training forwards: the policy over a batch's rows, and the drafter over its features."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fastgrpo_jax import base, sharding
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.train import layout
from fastgrpo_jax.train.layout import Places, StepBatch


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


def read(
    frame: Frame,
    params: base.Params,
    batch: StepBatch,
    places: Places,
    remat: bool = False,
    taps: tuple[int, ...] = (),
    adapters: base.Params = None,
) -> tuple[Float[Array, "A X F"], Float[Array, "N R E"]]:
    """Run the policy's body; returns what a drafter reads, and the features before responses.

    adapters: of LoRA, scaled; they act beside the kernels.
    """
    shape = frame.width(batch), frame.responses(batch)
    tokens = layout.tokens(batch, places, *shape)
    rows = _policy_rows(frame, batch, places)
    body = policy.Policy(frame.policy, remat, taps)
    variables = {"params": params} | ({} if adapters is None else {"lora": adapters})
    found = body.apply(variables, tokens, rows.positions, rows.mask)
    return found.tapped, ahead(frame, found.features, batch, places)


def ahead(
    frame: Frame, features: Float[Array, "A X F"], batch: StepBatch, places: Places
) -> Float[Array, "N R F"]:
    """Take the features of the places from which each response token is predicted."""
    before = _policy_rows(frame, batch, places).before
    return layout.per_sequence(layout.take(features, before), batch.tokens.shape[0])


def _policy_rows(frame: Frame, batch: StepBatch, places: Places) -> layout.Rows:
    responses = frame.responses(batch)
    context = batch.prompt_length[::responses]
    return layout.rows(context, frame.width(batch), responses, places.position.shape[1])


class Drafts(NamedTuple):
    """What the drafter says of each response token, at each of J unrolled steps.

    next_feature: of the feature that predicts the token.
    hidden: the head of it is the distribution of the token.
    """

    next_feature: Float[Array, "N R J E"]
    hidden: Float[Array, "N R J E"]


def draft(
    frame: Frame,
    config: base.EagleConfig,
    drafter: base.Params,
    embed: Float[Array, "V E"],
    features: Float[Array, "A X F"],
    batch: StepBatch,
    places: Places,
    unroll: int = 1,
) -> Drafts:
    """Run the drafter over all pairs of true features, then over its own estimates.

    Pair t is (f_t, embedding of x_{t+1}), so a response's own pairs begin at the prompt's last
    feature, and the prompt has one pair fewer than tokens. The token at position i is drafted
    from pair i - 2, the one before the pair that ends in it.

    At unrolled step j (training-time test, EAGLE-3, arXiv 2503.01840) pair t holds the estimate
    of f_t that step j - 1 made from pair t - 1. As in drafting it sees the true pairs up to
    t - j and, of the pairs between, those of its own path. No gradient reaches the policy.
    """
    width, responses = frame.width(batch), frame.responses(batch)
    count, spots = places.position.shape
    mesh = frame.policy.mesh
    drafter = sharding.gathered(mesh, drafter)
    embed = sharding.gathered(mesh, {"embed": embed})["embed"]
    rows = layout.rows(batch.prompt_length[::responses] - 1, width - 1, responses, spots)
    tokens = layout.tokens(batch, places, width, responses)[:, 1:]
    embeds = policy.embed(embed, tokens, features.dtype)
    own = ahead(frame, features, batch, places).reshape(features.shape[0], -1, features.shape[-1])
    pairs = jnp.concatenate([features[:, : width - 1], own], axis=1)
    pairs, embeds = sharding.rows(mesh, jax.lax.stop_gradient((pairs, embeds)))
    length = pairs.shape[1]
    back = [jnp.broadcast_to(jnp.arange(length), rows.previous.shape)]  # of j places before
    cache, found = None, []
    for j in range(unroll):
        if unroll > 1:
            room = eagle.new_cache(config, pairs.shape[0], length)
            cache = jax.tree.map(_joined, cache, room) if j else room
        start = jnp.full(pairs.shape[0], j * length, jnp.int32)
        mask = _seen(rows.mask, back)
        next_feature, hidden, cache = eagle.Eagle(config).apply(
            {"params": drafter}, pairs, embeds, rows.positions, mask, cache, start
        )
        found.append((next_feature, hidden))
        pairs = _at(next_feature, rows.previous)
        back.append(jnp.where(back[-1] < 0, -1, _at(rows.previous, back[-1])))
    taken = [[layout.take(x, rows.before) for x in both] for both in found]
    return Drafts(*(layout.per_sequence(jnp.stack(x, axis=2), count) for x in zip(*taken)))


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


def unrolled_weights(places: Places, unroll: int) -> Float[Array, "N R J"]:
    """Weigh the drafts of each response token: 0 where a step has no true pair to start from."""
    enough = places.position[..., None] >= 2 + jnp.arange(unroll)
    return jnp.where(enough, places.drafter_weights[..., None], 0)
