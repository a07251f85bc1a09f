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


class Scores(NamedTuple):
    """What is kept of each row of logits.

    logps: log softmax(logits / T) of the target token.
    entropy: of softmax(logits / T), in nats, without a gradient.
    draft_ce: cross entropy of the drafter's distribution under softmax(logits), both at
      temperature 1; None without a drafter. Its gradient reaches `hidden` alone.
    """

    logps: Float[Array, " n"]
    entropy: Float[Array, " n"]
    draft_ce: Float[Array, " n"] | None


def score(
    features: Float[Array, "n E"],
    table: Float[Array, "V E"],
    targets: Int[Array, " n"],
    temperature: Float[Array, " n"],
    chunk: int,
    hidden: Float[Array, "n E"] | None = None,
) -> Scores:
    """Score target tokens by the head, `chunk` tokens at a time.

    A temperature of 0 divides by 1, as in sampling. bfloat16 features give float32 scores.
    """
    count = features.shape[0]
    chunk = min(chunk, count)
    chunks = -(-count // chunk)

    def split(x):
        x = jnp.pad(x, [(0, chunks * chunk - count)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(chunks, chunk, *x.shape[1:])

    # The scan itself keeps the two copies apart; guarding against CSE would only cost fusions.
    one = jax.checkpoint(_score_chunk, prevent_cse=False)
    inputs = jax.tree.map(split, (features, targets, temperature, hidden))
    _, scores = jax.lax.scan(lambda _, xs: (None, one(table, *xs)), None, inputs)
    return jax.tree.map(lambda x: x.reshape(-1)[:count], scores)


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
    target = jax.nn.softmax(jax.lax.stop_gradient(logits), axis=1)
    drafted = policy.logits(hidden, jax.lax.stop_gradient(table))
    draft_ce = jax.nn.logsumexp(drafted, axis=1) - jnp.sum(target * drafted, axis=1)
    return Scores(logps, entropy, draft_ce)
