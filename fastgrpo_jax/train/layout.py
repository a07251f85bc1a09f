"""How a batch lies in the training forward: a prompt once, then the responses of its group.

A group answers one prompt, so its tokens need to be read once only: a row of the forward is

    prompt, padded to Lp | response 0, padded to R | response 1 | ... | response g - 1

Every response sees the prompt and itself, and its positions go on where the prompt ended. With
g = 1 this is a batch of single sequences. All g responses of a row attend over one another's
padding in vain, so for long responses rows of their own are cheaper: see `responses_per_row`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fastgrpo_jax import base
from fastgrpo_jax.train import grpo


class StepBatch(NamedTuple):
    """What a step trains on. Rows with length == prompt_length contribute nothing.

    tokens: prompt then response, from position 0; what follows `length` is never read. The rows
      of a group follow one another and have the same prompt.
    logps: the rollout's log-prob of each token, 0 on prompts.
    temperature: that the row was sampled at; 0 counts as 1.
    kept: rows that the policy's loss is of; the others still teach the drafter. None: all.
    staleness: updates of the policy since the row was sampled. None: 0.
    """

    tokens: Int[Array, "N T"]
    prompt_length: Int[Array, " N"]
    length: Int[Array, " N"]
    logps: Float[Array, "N T"]
    advantages: Float[Array, " N"]
    temperature: Float[Array, " N"]
    kept: Bool[Array, " N"] | None = None
    staleness: Int[Array, " N"] | None = None


def fill(batch: StepBatch, count: int) -> StepBatch:
    """Add rows that contribute nothing: each has a prompt of one token and no response."""
    if not count:
        return batch
    more = jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), batch)
    one = jnp.ones_like(more.length)
    more = more._replace(prompt_length=one, length=one)
    return jax.tree.map(lambda *x: jnp.concatenate(x), batch, more)


class Places(NamedTuple):
    """The response tokens of each sequence, R = min(max_response, T) places.

    position: of the token in its sequence; clipped to it where `mask` is False.
    weights: of the policy's loss, 0 in rows that it leaves out.
    drafter_weights: of sequence means, 0 for a token that no drafter pair precedes.
    """

    position: Int[Array, "N R"]
    mask: Bool[Array, "N R"]
    weights: Float[Array, "N R"]
    drafter_weights: Float[Array, "N R"]


class Rows(NamedTuple):
    """Rows of a forward: X = Lp + g R places each.

    mask: what each place sees. before: in each row, the place that precedes a response token
      (the prompt's last for the first one): it is from there that the token is predicted.
    """

    positions: Int[Array, "A X"]
    mask: Bool[Array, "A X X"]
    before: Int[Array, "A gR"]

    @property
    def previous(self) -> Int[Array, "A X"]:
        """Find the place that precedes each place in its sequence; -1 where there is none."""
        width = self.positions.shape[1] - self.before.shape[1]
        prompt = jnp.broadcast_to(jnp.arange(-1, width - 1), (self.before.shape[0], width))
        return jnp.concatenate([prompt, self.before], axis=1)


def responses_per_row(policy: base.PolicyConfig, group: int, prompt: int, response: int) -> int:
    """Choose g, the group's size or 1, whichever costs a layer fewer operations.

    A place costs 2 W in matmuls (W weights a layer) and 4 Q H per place that it is scored
    against, masked or not.
    """
    c = policy
    weights = c.hidden * (2 * (c.heads + c.kv_heads) * c.head_dim + 3 * c.ffn)

    def cost(places: int) -> int:
        return 2 * weights * places + 4 * c.heads * c.head_dim * places**2

    together, apart = cost(prompt + group * response), group * cost(prompt + response)
    return group if together < apart else 1


def locate(batch: StepBatch, max_response: int, loss: str) -> Places:
    """Find the response tokens by position, never by value, and weigh them over the batch."""
    last = batch.tokens.shape[1] - 1
    offset = jnp.arange(min(max_response, last + 1), dtype=jnp.int32)
    position = batch.prompt_length[:, None] + offset
    mask = position < batch.length[:, None]
    counted = mask if batch.kept is None else mask & batch.kept[:, None]
    return Places(
        position=jnp.clip(position, 0, last),
        mask=mask,
        weights=grpo.token_weights(counted, loss, max_response),
        drafter_weights=grpo.token_weights(mask & (position >= 2), "grpo", max_response),
    )


def rows(context: Int[Array, " A"], width: int, responses: int, places: int) -> Rows:
    """Lay out rows: `width` places of which `context` are real, then the responses' places."""
    own = jnp.arange(responses * places, dtype=jnp.int32)
    response, offset = own // places, own % places
    count = context.shape[0]
    prompt = jnp.arange(width, dtype=jnp.int32)
    positions = jnp.concatenate(
        [jnp.broadcast_to(prompt, (count, width)), context[:, None] + offset], axis=1
    )
    # Which response a place belongs to; -1 is the prompt, which comes first and sees itself only.
    part = jnp.concatenate([jnp.full(width, -1, jnp.int32), response])
    index = jnp.arange(part.size)
    causal = (part[:, None] == part) & (index[:, None] >= index)
    real_prompt = (part == -1) & (index < context[:, None])  # [A, X]
    mask = causal | ((part >= 0)[:, None] & real_prompt[:, None])
    before = jnp.where(offset == 0, context[:, None] - 1, width + own - 1)
    return Rows(positions, mask, before)


def tokens(batch: StepBatch, places: Places, width: int, responses: int) -> Int[Array, "A X"]:
    """Arrange the batch's tokens as `rows` lays them out."""
    groups = batch.tokens.shape[0] // responses
    prompt = batch.tokens.reshape(groups, responses, -1)[:, 0, :width]
    answer = jnp.take_along_axis(batch.tokens, places.position, axis=1)
    return jnp.concatenate([prompt, answer.reshape(groups, -1)], axis=1)


def take(x: Float[Array, "A X E"], place: Int[Array, "A gR"]) -> Float[Array, "A gR E"]:
    """Take places of each row; one before the row's first gives the first, and must be masked."""
    return jnp.take_along_axis(x, jnp.maximum(place, 0)[..., None], axis=1)


def per_sequence(x: Any, count: int) -> Any:
    """Split the responses of each row: [A, g R, ...] to [N, R, ...]."""
    return x.reshape(count, -1, *x.shape[2:])
