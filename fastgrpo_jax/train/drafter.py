"""Training a drafter on its own: the policy reads each rollout once, the drafter many times.

What the policy says of a batch does not change while it stands still, so its features are kept
and an update costs the drafter's own forward and the draft vocabulary's part of the head.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fastgrpo_jax import base, spmd
from fastgrpo_jax.models import head, policy
from fastgrpo_jax.train import distill, forward, layout, optim
from fastgrpo_jax.train.layout import StepBatch


class Lesson(NamedTuple):
    """A batch of whole groups, and what `forward.read` gives of it: what the drafter reads, and
    the features that it should tell."""

    batch: StepBatch
    tapped: Float[Array, "A X F"]
    ahead: Float[Array, "A S E"]


class Frozen(NamedTuple):
    """The policy's parts that drafting uses. `head` has the draft vocabulary's rows."""

    embed: Float[Array, "V E"]
    head: Float[Array, "W E"]


class State(NamedTuple):
    """A drafter in training; donated to each update."""

    params: base.Params
    opt_state: Any


class Config(NamedTuple):
    """What the programs are compiled for."""

    frame: forward.Frame
    eagle: base.EagleConfig
    optim: optim.OptimConfig
    distill: distill.DistillConfig
    head_chunk: int = 256


def init(config: Config, params: base.Params) -> State:
    """Make the first state; it owns the arrays from then on."""
    return State(params, optim.make_optimizer(config.optim).init(params))


def freeze(params: base.Params, ids: Int[Array, " W"] | None = None) -> Frozen:
    """Take what drafting uses of a policy, with a draft vocabulary or with all ids."""
    table = policy.head_table(params)
    return Frozen(params["embed"], table if ids is None else table[ids])


@functools.partial(jax.jit, static_argnums=0)
def read(config: Config, params: base.Params, batch: StepBatch) -> Lesson:
    """Run the policy over a batch and keep its features."""
    places = layout.locate(batch, config.frame.max_response, "grpo")
    rows = config.frame.rows(batch, places)
    found = forward.read(config.frame.policy, params, rows, taps=config.eagle.taps)
    return Lesson(batch, *found)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def update(
    config: Config, frozen: Frozen, state: State, lesson: Lesson
) -> tuple[State, Float[Array, ""]]:
    """Take one step on the drafter's loss; returns it too. A non-finite step changes nothing."""
    loss, grads = jax.value_and_grad(lambda p: _study(config, frozen, p, lesson)[0])(state.params)
    optimizer = optim.make_optimizer(config.optim)
    new = optim.guarded_update(optimizer, loss, grads, state.params, state.opt_state)
    mesh = config.frame.policy.mesh
    return spmd.trained(mesh, State(new.params, new.opt_state)), loss


@functools.partial(jax.jit, static_argnums=0)
def examine(
    config: Config, frozen: Frozen, params: base.Params, lesson: Lesson
) -> Float[Array, " J"]:
    """Estimate the acceptance of one draft at each unrolled step, 1 - TV at temperature 1.

    It is the mean over the sequences' token means, and speaks of ids in the draft vocabulary.
    """
    _, scores, weights = _study(config, frozen, params, lesson)
    kept = jnp.sum(jnp.where(weights > 0, weights * (1 - scores.tv), 0), axis=(0, 1))
    return kept / jnp.sum(weights, axis=(0, 1))


def _study(config: Config, frozen: Frozen, params, lesson: Lesson):
    batch, unroll = lesson.batch, config.distill.unroll
    places = layout.locate(batch, config.frame.max_response, "grpo")
    rows = config.frame.rows(batch, places)
    drafts = forward.draft(config.eagle, params, frozen.embed, lesson.tapped, rows, unroll)
    spots = rows.sequence.size
    scores = head.score_drafts(
        lesson.ahead.reshape(spots, -1),
        frozen.head,
        drafts.hidden.reshape(spots, unroll, -1),
        config.head_chunk,
    )
    distance = distill.feature_distance(
        drafts.next_feature, lesson.ahead, forward.drafted(rows, unroll)
    )
    scores = jax.tree.map(lambda x: x.reshape(distance.shape), scores)
    distance, scores = jax.tree.map(
        lambda x: layout.per_sequence(x, rows, places), (distance, scores)
    )
    weights = forward.unrolled_weights(places, unroll)
    loss, _ = distill.drafter_loss(distance, scores, weights, config.distill)
    return loss, scores, weights
