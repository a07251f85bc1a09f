"""How a batch lies in the training forward: a prompt once, then the responses of its group.

A group answers one prompt, so its tokens need to be read once only: a padded row of the forward is

    prompt, padded to Lp | response 0, padded to R | response 1 | ... | response g - 1

Every response sees the prompt and itself, and its positions go on where the prompt ended. With
g = 1 this is a batch of single sequences. All g responses of a row attend over one another's
padding in vain, so for long responses rows of their own are cheaper: see `responses_per_row`.

Packed, a row is a bin that sequences of any groups share, each whole; so there is hardly any
padding, and the cost follows the tokens. Which lies where is for the host to say: `packing.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fastgrpo_jax import base
from fastgrpo_jax.train import grpo


class Packed(NamedTuple):
    """Where the sequences of a batch lie in bins of X places. The shapes depend on no length.

    count: bins that are filled; the others come last and are never run.
    sequence: whose token is at a place, of a shared prompt the first of those that share it;
      -1: an empty place.
    position: of the token in the sequence.
    previous: the place before it in its sequence; -1 where there is none.
    bin, start: where a sequence's response lies, in one piece; bin -1: it has none.
    """

    count: Int[Array, ""]
    sequence: Int[Array, "bins X"]
    position: Int[Array, "bins X"]
    previous: Int[Array, "bins X"]
    bin: Int[Array, " N"]
    start: Int[Array, " N"]


class StepBatch(NamedTuple):
    """What a step trains on. Rows with length == prompt_length contribute nothing.

    tokens: prompt then response, from position 0; what follows `length` is never read. The rows
      of a group follow one another and have the same prompt.
    logps: the rollout's log-prob of each token, 0 on prompts.
    temperature: that the row was sampled at; 0 counts as 1.
    kept: rows that the policy's loss is of; the others still teach the drafter. None: all.
    staleness: updates of the policy since the row was sampled. None: 0.
    draft_ids: the draft vocabulary, among which the drafter is compared. None: all ids.
    packed: how to pack the forward. None: rows are padded.
    """

    tokens: Int[Array, "N T"]
    prompt_length: Int[Array, " N"]
    length: Int[Array, " N"]
    logps: Float[Array, "N T"]
    advantages: Float[Array, " N"]
    temperature: Float[Array, " N"]
    kept: Bool[Array, " N"] | None = None
    staleness: Int[Array, " N"] | None = None
    draft_ids: Int[Array, " W"] | None = None
    packed: Packed | None = None


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
    """What a forward runs on: rows of X places, of which the last S may hold response tokens.

    mask: what each place sees.
    previous: the place that precedes each place in its sequence, which for a response's first
      token is the prompt's last; -1 where there is none.
    sequence: of each of the last S places, whose response token it holds; -1: of none.
    spot: of each response token, the one of all A S places that holds it, and any for what is not
      in these rows; None: they lie in order.
    """

    tokens: Int[Array, "A X"]
    positions: Int[Array, "A X"]
    mask: Bool[Array, "A X X"]
    previous: Int[Array, "A X"]
    sequence: Int[Array, "A S"]
    spot: Int[Array, "N R"] | None = None

    @property
    def before(self) -> Int[Array, "A S"]:
        """Find the places from which the response tokens are predicted."""
        return self.previous[:, -self.sequence.shape[1] :]

    @property
    def targets(self) -> Int[Array, "A S"]:
        """Take the ids of the response tokens."""
        return self.tokens[:, -self.sequence.shape[1] :]


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


def padded(batch: StepBatch, places: Places, width: int, responses: int) -> Rows:
    """Lay out rows of a prompt's `width` places and those of `responses` sequences, S = g R."""
    count, spots = places.position.shape
    context = batch.prompt_length[::responses, None]
    own = jnp.arange(responses * spots, dtype=jnp.int32)
    response, offset = own // spots, own % spots
    prompt = jnp.arange(width, dtype=jnp.int32)

    def beside(left, right):
        rows = count // responses
        both = (jnp.broadcast_to(x, (rows, x.shape[-1])) for x in (left, right))
        return jnp.concatenate([*both], axis=1)

    positions = beside(prompt, context + offset)
    part = beside(jnp.where(prompt < context, _PROMPT, _NONE), response)
    answer = jnp.take_along_axis(batch.tokens, places.position, axis=1)
    sequence = jnp.where(places.mask, jnp.arange(count, dtype=jnp.int32)[:, None], -1)
    return Rows(
        tokens=beside(batch.tokens[::responses, :width], answer.reshape(-1, own.size)),
        positions=positions,
        mask=_visible(jnp.zeros_like(part), part, positions),
        previous=beside(prompt - 1, jnp.where(offset == 0, context - 1, width + own - 1)),
        sequence=sequence.reshape(-1, own.size),
    )


def packed(
    batch: StepBatch, places: Places, first: Int[Array, ""], group: int, count: int = 1
) -> Rows:
    """Lay out some bins of a packed batch, S = X; of a group each has the prompt once."""
    pack, length = batch.packed, batch.packed.sequence.shape[1]
    sequence, positions, previous = (
        jax.lax.dynamic_slice_in_dim(x, first, count)
        for x in (pack.sequence, pack.position, pack.previous)
    )
    owner = jnp.maximum(sequence, 0)
    part = jnp.where(positions < batch.prompt_length[owner], _PROMPT, owner)
    part = jnp.where(sequence < 0, _NONE, part)
    offset = jnp.arange(places.position.shape[1], dtype=jnp.int32)
    return Rows(
        tokens=batch.tokens[owner, positions],
        positions=positions,
        mask=_visible(owner // group, part, positions),
        previous=previous,
        sequence=jnp.where(part >= 0, sequence, -1),
        spot=jnp.clip(
            ((pack.bin - first) * length + pack.start)[:, None] + offset, 0, count * length - 1
        ),
    )


def only(places: Places, mine: Bool[Array, " N"]) -> Places:
    """Leave out the response tokens of all other sequences."""
    kept = (jnp.where(mine[:, None], x, 0) for x in (places.weights, places.drafter_weights))
    return Places(places.position, places.mask & mine[:, None], *kept)


_PROMPT, _NONE = -1, -2  # parts of a row that are no response's; nothing sees the places of none


def _visible(
    group: Int[Array, "A X"], part: Int[Array, "A X"], positions: Int[Array, "A X"]
) -> Bool[Array, "A X X"]:
    """Say what each place sees: of its group the prompt and its own response, up to itself."""

    def against(x):
        return x[:, :, None], x[:, None, :]

    (own_group, their_group), (own, their), (now, then) = map(against, (group, part, positions))
    seen = (their == _PROMPT) | (their == own) & (their != _NONE)
    return seen & (own_group == their_group) & (then <= now)


def take(x: Float[Array, "A X E"], place: Int[Array, "A S"]) -> Float[Array, "A S E"]:
    """Take places of each row; one before the row's first gives the first, and must be masked."""
    return jnp.take_along_axis(x, jnp.maximum(place, 0)[..., None], axis=1)


def per_sequence(x: Any, rows: Rows, places: Places) -> Any:
    """Bring what was found for the response tokens of rows back to the sequences: [A, S, ...] to
    [N, R, ...]. What is not in these rows gets any numbers."""
    if rows.spot is None:
        return x.reshape(*places.position.shape, *x.shape[2:])
    return x.reshape(-1, *x.shape[2:])[rows.spot]
