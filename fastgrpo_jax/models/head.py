"""The output head over many tokens, in chunks.

[tokens, vocabulary] logits are the largest array of a GRPO step (49k ids x 4k tokens are
800 MB in float32, several times over), so they exist for `chunk` tokens at a time only, and
are made again in the backward pass. All that anyone wants of a logit row is taken while it
exists: the log-prob of a token, the entropy, and the drafter's target.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fastgrpo_jax.models import policy


class DraftScores(NamedTuple):
    """How far the drafter's distributions q are from the policy's p, both at temperature 1.

    ce: cross entropy, -sum p log q. tv: total variation, sum |p - q| / 2: under the best
      coupling one draft is accepted with probability 1 - tv. Gradients reach `hidden` alone.
    """

    ce: Float[Array, "*n J"]
    tv: Float[Array, "*n J"]


class Scores(NamedTuple):
    """What is kept of each row of logits.

    logps: log softmax(logits / T) of the target token.
    entropy: of softmax(logits / T), in nats, without a gradient.
    draft: scores of J drafts of each token; None without a drafter.
    """

    logps: Float[Array, " n"]
    entropy: Float[Array, " n"]
    draft: DraftScores | None


def score(
    features: Float[Array, "n E"],
    table: Float[Array, "V E"],
    targets: Int[Array, " n"],
    temperature: Float[Array, " n"],
    chunk: int,
    hidden: Float[Array, "n J E"] | None = None,
    ids: Int[Array, " W"] | None = None,
    count: Int[Array, ""] | None = None,
) -> Scores:
    """Score target tokens by the head, `chunk` tokens at a time.

    A temperature of 0 divides by 1, as in sampling. bfloat16 features give float32 scores.

    Args:
      hidden: the drafter's; its drafts are compared among all ids, or among `ids` alone.
      count: tokens that are scored, the first ones; chunks after them cost nothing and give 0.
    """
    few = None if ids is None else (jax.lax.stop_gradient(table)[ids], ids)
    moving, fixed = (features, hidden), (targets, temperature)
    return _in_chunks(_score_chunk, chunk, table, moving, fixed, few, count)


def score_drafts(
    features: Float[Array, "n E"],
    table: Float[Array, "W E"],
    hidden: Float[Array, "n J E"],
    chunk: int,
) -> DraftScores:
    """Compare drafts with the policy, `chunk` tokens at a time.

    With a part of the head's rows (a draft vocabulary) both distributions are those among it.
    """
    return _in_chunks(_draft_chunk, chunk, table, (features, hidden))


def _in_chunks(function, chunk: int, table, moving, fixed=(), few=None, count=None):
    """Apply function(table, moving, fixed, few) to `chunk` tokens at a time, keeping no logits."""
    tokens = moving[0].shape[0]
    chunk = min(chunk, tokens)
    chunks = -(-tokens // chunk)

    def split(x):
        x = jnp.pad(x, [(0, chunks * chunk - tokens)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(chunks, chunk, *x.shape[1:])

    filled = chunks if count is None else -(-count // chunk)
    out = _each_chunk(function, filled, table, *jax.tree.map(split, (moving, fixed)), few)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each_chunk(function, count, table, moving, fixed, few):
    """Apply function to the first `count` chunks; gradients are those of table and moving.

    They are written out because reverse mode goes through no loop of a length that is not known.
    """

    def one(i, out):
        found = function(table, *_take(i, (moving, fixed)), few)
        return jax.tree.map(lambda all, x: all.at[i].set(x), out, found)

    shapes = jax.eval_shape(function, table, *_take(0, (moving, fixed)), few)
    chunks = moving[0].shape[0]
    out = jax.tree.map(lambda x: jnp.zeros((chunks, *x.shape), x.dtype), shapes)
    return jax.lax.fori_loop(0, count, one, out)


def _each_chunk_forward(function, *args):
    return _each_chunk(function, *args), args


def _each_chunk_backward(function, args, change):
    """Make each chunk's logits again, and add up what the table gets of them."""
    count, table, moving, fixed, few = args

    def one(i, total):
        own, rest = _take(i, (moving, fixed))
        _, pull = jax.vjp(lambda table, own: function(table, own, rest, few), table, own)
        of_table, of_own = pull(_take(i, change))
        return total[0] + of_table, jax.tree.map(lambda all, x: all.at[i].set(x), total[1], of_own)

    zeros = jax.tree.map(jnp.zeros_like, (table, moving))
    of_table, of_moving = jax.lax.fori_loop(0, count, one, zeros)
    return None, of_table, of_moving, None, None


_each_chunk.defvjp(_each_chunk_forward, _each_chunk_backward)


def _take(i, x):
    return jax.tree.map(lambda x: x[i], x)


def _score_chunk(table, moving, fixed, few) -> Scores:
    (features, hidden), (targets, temperature) = moving, fixed
    logits = policy.logits(features, table)
    scaled = logits / jnp.where(temperature == 0, 1, temperature).astype(logits.dtype)[:, None]
    # A masked sum instead of a gather: its gradient is a fused select, not a scatter.
    chosen = jnp.arange(logits.shape[1], dtype=targets.dtype) == targets[:, None]
    norm = jax.nn.logsumexp(scaled, axis=1)
    logps = jnp.sum(jnp.where(chosen, scaled, 0), axis=1) - norm
    frozen, frozen_norm = jax.lax.stop_gradient((scaled, norm))
    entropy = frozen_norm - jnp.sum(jnp.exp(frozen - frozen_norm[:, None]) * frozen, axis=1)
    if hidden is None:
        return Scores(logps, entropy, None)
    if few is None:
        return Scores(logps, entropy, _compare(table, logits, hidden))
    few_rows, ids = few
    return Scores(logps, entropy, _compare(few_rows, logits[:, ids], hidden))


def _draft_chunk(table, moving, fixed, few) -> DraftScores:
    features, hidden = moving
    return _compare(table, policy.logits(features, table), hidden)


def _compare(table, logits, hidden) -> DraftScores:
    target = jax.nn.softmax(jax.lax.stop_gradient(logits), axis=-1)[:, None]
    drafted = policy.logits(hidden, jax.lax.stop_gradient(table))
    norm = jax.nn.logsumexp(drafted, axis=-1)
    ce = norm - jnp.sum(target * drafted, axis=-1)
    tv = 0.5 * jnp.sum(jnp.abs(target - jnp.exp(drafted - norm[..., None])), axis=-1)
    return DraftScores(ce, tv)
