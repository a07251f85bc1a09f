"""The output head over many tokens, in chunks.

[tokens, vocabulary] logits are the largest array of a GRPO step (49k ids x 4k tokens are
800 MB in float32, several times over), so they exist for `chunk` tokens at a time only, and
are made again in the backward pass. All that anyone wants of a logit row is taken while it
exists: the log-prob of a token, the entropy, and the drafter's target.
"""

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
) -> Scores:
    """Score target tokens by the head, `chunk` tokens at a time.

    A temperature of 0 divides by 1, as in sampling. bfloat16 features give float32 scores.
    """
    return _in_chunks(_score_chunk, chunk, table, (features, targets, temperature, hidden))


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


def _in_chunks(function, chunk: int, table, inputs):
    """Apply function(table, *inputs) to `chunk` tokens at a time, keeping no logits."""
    count = inputs[0].shape[0]
    chunk = min(chunk, count)
    chunks = -(-count // chunk)

    def split(x):
        x = jnp.pad(x, [(0, chunks * chunk - count)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(chunks, chunk, *x.shape[1:])

    # The scan itself keeps the two copies apart; guarding against CSE would only cost fusions.
    one = jax.checkpoint(function, prevent_cse=False)
    _, out = jax.lax.scan(lambda _, xs: (None, one(table, *xs)), None, jax.tree.map(split, inputs))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], out)


def _score_chunk(table, features, targets, temperature, hidden) -> Scores:
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
    return Scores(logps, entropy, _compare(table, logits, hidden))


def _draft_chunk(table, features, hidden) -> DraftScores:
    return _compare(table, policy.logits(features, table), hidden)


def _compare(table, logits, hidden) -> DraftScores:
    target = jax.nn.softmax(jax.lax.stop_gradient(logits), axis=-1)[:, None]
    drafted = policy.logits(hidden, jax.lax.stop_gradient(table))
    norm = jax.nn.logsumexp(drafted, axis=-1)
    ce = norm - jnp.sum(target * drafted, axis=-1)
    tv = 0.5 * jnp.sum(jnp.abs(target - jnp.exp(drafted - norm[..., None])), axis=-1)
    return DraftScores(ce, tv)
