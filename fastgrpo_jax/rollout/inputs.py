"""What a rollout is asked, and the arrays that it begins with."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base, sharding
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.rollout import sampling


class Settings(NamedTuple):
    """Sampling settings of a whole rollout."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0


class Request(NamedTuple):
    """What to answer: token ids of P prompts and their places in the data stream.

    expected: how long each prompt's responses are likely to be, to admit the longest first.
    caps: a limit of the new tokens of each of the P * G rows, where they differ.
    starts: what each row goes on from, where that is more than its prompt: then the tokens of the
      rollout's batch count as prompt up to there.
    done: rows that are answered already; they are left alone.
    """

    prompts: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]
    seed: int
    step: int
    expected: tuple[float, ...] | None = None
    caps: tuple[int, ...] | None = None
    starts: tuple[tuple[int, ...], ...] | None = None
    done: tuple[bool, ...] | None = None

    def rows(self, group: int) -> list[tuple[int, ...]]:
        """List what each row goes on from."""
        if self.starts is not None:
            return list(self.starts)
        return [prompt for prompt in self.prompts for _ in range(group)]


def sequences(
    engine: engine_lib.Engine, request: Request, limits: engine_lib.Limits
) -> base.Sequences:
    group, count = engine.spec.group, len(request.prompts)
    rows = count * group
    if limits.total > engine.max_length or rows != engine.total:
        raise ValueError(
            f"{rows} rows of at most {limits.total} tokens; the engine is laid out for "
            f"{engine.total} rows of {engine.max_length}"
        )
    tokens = np.full((rows, engine.max_length), -1, np.int32)
    starts = request.rows(group)
    length = np.array([len(start) for start in starts], np.int32)
    longest = min(limits.prompt, limits.total - 1)
    for i, start in enumerate(starts):
        if not 1 <= len(start) <= longest:
            raise base.UserError(
                f"prompt at place {request.places[i // group]} has {len(start)} tokens; allowed: 1 "
                f"to {longest} (task.max_prompt_length, and one less than sampling.max_length)"
            )
        tokens[i, : len(start)] = start
    zeros = np.zeros((rows, engine.max_length), np.float32)
    caps = limits.response if request.caps is None else np.minimum(request.caps, limits.response)
    sequences = base.Sequences(
        tokens=jnp.asarray(tokens),
        logps=jnp.asarray(zeros),
        masses=jnp.asarray(zeros),
        prompt_length=jnp.asarray(length),
        length=jnp.asarray(length),
        limit=jnp.asarray(np.minimum(length + caps, limits.total).astype(np.int32)),
        done=jnp.zeros(rows, bool) if request.done is None else jnp.asarray(request.done),
        stopped=jnp.zeros(rows, bool),
    )
    return sharding.put(engine.spec.policy.mesh, sequences)


def sampling_of(request: Request, group: int, settings: Settings) -> base.Sampling:
    rows = len(request.places) * group
    places = np.repeat(np.asarray(request.places, np.uint64), group)
    samples = np.tile(np.arange(group, dtype=np.uint64), len(request.places))
    return base.Sampling(
        key=sampling.row_keys(request.seed, request.step, places, samples),
        temperature=jnp.full(rows, settings.temperature, jnp.float32),
        top_k=jnp.full(rows, settings.top_k, jnp.int32),
        top_p=jnp.full(rows, settings.top_p, jnp.float32),
    )
