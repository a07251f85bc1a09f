"""Toy rollouts shared by the tests of the engine: a model, engines, a request, longhand answers.

Compiled programs are kept for the whole process, one pool per `Spec`, so that tests which ask
for the same bucket and strategy share them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.rollout import (
    decode,
    draft_oracle,
    generate,
    inputs,
    record,
    sampling,
    speculate,
    strategy,
)
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.rollout import pool as pool_lib

VOCAB = 37
GROUP = 3
STOP = 4
NEVER = 1000  # a stop token that no model has
LIMITS = engine_lib.Limits(prompt=12, response=22, total=32)
SAMPLED = inputs.Settings(1.0)
REQUEST = inputs.Request(
    prompts=((7,), tuple(range(2, 14)), (31, 30, 31, 36, 0, 4, 11)),
    places=(3, 2**33, 11),
    seed=5,
    step=2,
)
ROWS = GROUP * len(REQUEST.prompts)
DEEPEST_SPAN = 12

CONFIG = base.PolicyConfig(
    vocab=VOCAB,
    hidden=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ffn=32,
    max_positions=64,
    tied=False,  # so that the embedding cannot stand in for the head
    dtype="float64",
)
SPEC = speculate.Spec(
    policy=CONFIG, eagle=eagle.config_for(CONFIG, "fastgrpo"), group=GROUP, prefill_chunk=8
)
DETERMINISTIC = speculate.Spec(
    policy=CONFIG,
    eagle=eagle.config_for(CONFIG, "eagle"),
    group=GROUP,
    shared_noise=False,
    prefill_chunk=8,
)

THREE_DEPTHS = speculate.Spec(
    policy=CONFIG,
    eagle=dataclasses.replace(eagle.config_for(CONFIG, "fastgrpo"), taps=(0, 1, 1)),
    group=GROUP,
    prefill_chunk=8,
)

_pools: dict[speculate.Spec, pool_lib.Pool] = {}


def fixed(text: str) -> strategy.Controller:
    return strategy.constant("fixed", strategy.parse(text))


def engine(
    spec: speculate.Spec = SPEC,
    rows: tuple[int, ...] = (ROWS,),
    stop: int = STOP,
    rounds: int = 4,
    keep_finished: bool = False,
) -> engine_lib.Engine:
    """Make an engine of one slot count; equal specs share their programs."""
    made = engine_lib.make_engine(
        spec,
        rows=rows,
        limits=LIMITS,
        stop_tokens=(stop,),
        slot_step=48,
        rounds=rounds,
        span=DEEPEST_SPAN,
    )
    made.keep_finished = keep_finished
    made.pool = _pools.setdefault(spec, made.pool)
    return made


def sharpen(params: base.Params, scale: float) -> base.Params:
    """Scale the matrices of a fresh model, so that its distributions are far from uniform."""
    return jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)


@functools.cache
def policy_params(config: base.PolicyConfig = CONFIG, seed: int = 5) -> base.Params:
    return sharpen(policy.init(jax.random.key(seed), config), 20)


@functools.cache
def drafter_params(config: base.EagleConfig, seed: int = 1) -> base.Params:
    return sharpen(eagle.init(jax.random.key(seed), config), 5)


def weights(
    spec: speculate.Spec = SPEC,
    truth: np.ndarray | None = None,
    accept: float = 1.0,
    seed: int = 5,
    tau: float = 1.0,
) -> speculate.Weights:
    """Join policy, drafter and an oracle; all have one structure, so programs are shared."""
    if truth is None:
        truth = np.full((ROWS, LIMITS.total), -1)
    return speculate.Weights(
        policy_params(spec.policy, seed),
        drafter_params(spec.eagle) if spec.eagle else None,
        draft_oracle.OracleParams(jnp.asarray(truth, jnp.int32), jnp.float32(accept)),
        jnp.float32(tau),
    )


def poisoned(w: speculate.Weights) -> speculate.Weights:
    """Replace every weight of the drafter by NaN."""
    return w._replace(eagle=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), w.eagle))


def rollout(
    made: engine_lib.Engine,
    w: speculate.Weights,
    controller: strategy.Controller,
    settings: inputs.Settings = SAMPLED,
    request: inputs.Request = REQUEST,
    limits: engine_lib.Limits = LIMITS,
    look=lambda live: None,
    **more,
) -> record.Rollout:
    """Roll out, and fail rather than hang where rows never end."""
    blocks = []

    def watch(live: int):
        blocks.append(live)
        assert len(blocks) <= 2 * LIMITS.total, "the rollout does not end"
        look(live)

    return generate.rollout(made, w, request, settings, limits, controller, watch, **more)


@functools.cache
def plain(
    settings: inputs.Settings = SAMPLED,
    stop: int = STOP,
    request: inputs.Request = REQUEST,
) -> record.Rollout:
    """Decode without any draft: what every other way must reproduce."""
    return rollout(engine(stop=stop), weights(), fixed("off"), settings, request)


def told(plain_run: record.Rollout, accept: float = 1.0, spec=SPEC) -> speculate.Weights:
    """Make the weights whose oracle knows a finished rollout."""
    return weights(spec, plain_run.batch.tokens, accept)


def assert_same(found: base.RolloutBatch, wanted: base.RolloutBatch):
    """Check that two rollouts said the same, token by token; log-probs to float32's rounding."""
    np.testing.assert_array_equal(found.length, wanted.length)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.stopped, wanted.stopped)
    np.testing.assert_array_equal(found.prompt_length, wanted.prompt_length)
    np.testing.assert_allclose(found.logps, wanted.logps, rtol=0, atol=2e-6)
    np.testing.assert_allclose(found.masses, wanted.masses, rtol=0, atol=2e-6)


def accepted_share(run: record.Rollout) -> float:
    """Compute the share of the emitted tokens that were accepted drafts."""
    accepted = sum(int(b.report.accepted.sum()) for b in run.blocks)
    return accepted / sum(int(b.report.emitted) for b in run.blocks)


class Driver:
    """A rollout driven block by block, to look at its state in between."""

    def __init__(
        self, w: speculate.Weights, settings=SAMPLED, spec=SPEC, stop=STOP, request=REQUEST
    ):
        self.engine, self.weights = engine(spec, stop=stop), w
        read = generate._prefill(self.engine, w, request.prompts)
        rows = inputs.sequences(self.engine, request, LIMITS)
        need = max(map(len, request.prompts)) - 1 + DEEPEST_SPAN
        self.state = generate._begin(self.engine, request, read, rows, need).state
        self.sample = inputs.sampling_of(request, spec.group, settings)
        self.bucket = base.Bucket(ROWS, self.state.cache.k[0].shape[2])

    def block(self, text: str, rounds: int) -> base.BlockReport:
        choice = strategy.parse(text)
        self.state, report = pool_lib.call(
            self.engine.pool,
            ("block", self.bucket, choice),
            decode.decode_block,
            {0: self.engine.spec, 1: choice},
            self.weights,
            self.sample,
            jnp.asarray(self.engine.stop_tokens, jnp.int32),
            self.state,
            jnp.int32(0),
            jnp.int32(rounds),
        )
        return report

    def activate(self):
        self.state = pool_lib.call(
            self.engine.pool,
            ("activate", self.bucket),
            decode.activate,
            {0: self.engine.spec},
            self.weights,
            self.state,
        )


@functools.partial(jax.jit, static_argnums=(0, 3))
def read(config: base.PolicyConfig, params: base.Params, tokens, taps: tuple[int, ...] = ()):
    """Read whole rows in one causal forward: (logits [B, L, V], what a drafter reads, cache)."""
    rows, length = tokens.shape
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    model = policy.Policy(config, taps=taps)
    found = model.apply({"params": params}, tokens, place, mask)
    cached = model.apply(
        {"params": params},
        tokens,
        place,
        mask,
        policy.new_cache(config, rows, length),
        jnp.zeros(rows, jnp.int32),
    )
    logits = policy.logits(found.features, policy.head_table(params))
    return logits, found.tapped, cached.cache


@functools.partial(jax.jit, static_argnums=0)
def read_drafter(config: base.EagleConfig, params: base.Params, features, embeds):
    """Run a drafter over whole rows of pairs: (feature, hidden) [B, L, E] and its cache."""
    rows, length, _ = features.shape
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    return eagle.Eagle(config).apply(
        {"params": params},
        features,
        embeds,
        place,
        mask,
        eagle.new_cache(config, rows, length),
        jnp.zeros(rows, jnp.int32),
    )


def filtered(scaled: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Mark what top-k, then top-p of the rest keep of one row of logits, by sorting."""
    order = np.argsort(-scaled, kind="stable")[: top_k or len(scaled)]
    mass = np.exp(scaled[order] - scaled.max())
    before = np.cumsum(mass / mass.sum()) - mass / mass.sum()
    keep = np.zeros(len(scaled), bool)
    keep[order[before < top_p]] = True
    return keep


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def longhand(
    config: base.PolicyConfig,
    params: base.Params,
    request: inputs.Request,
    settings: inputs.Settings,
    limits: engine_lib.Limits,
    stop: int,
    group: int,
) -> base.RolloutBatch:
    """Sample token by token with a whole forward each, without cache, batch or draft tree."""
    prompts = [p for p in request.prompts for _ in range(group)]
    count = len(prompts)
    tokens = np.zeros((count, limits.total), np.int32)
    logps, masses = np.zeros(tokens.shape), np.zeros(tokens.shape)
    start = np.array([len(p) for p in prompts])
    noise = []
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
        key = sampling.row_keys(
            request.seed,
            request.step,
            np.array([request.places[i // group]]),
            np.array([i % group]),
        )
        noise.append(_row_noise(jnp.repeat(key, limits.total, axis=0), config.vocab))
    noise = np.asarray(noise, np.float64)
    length, stopped = start.copy(), np.zeros(count, bool)
    limit = np.minimum(start + limits.response, limits.total)
    while ((length < limit) & ~stopped).any():
        logits = np.asarray(read(config, params, jnp.asarray(tokens))[0])
        for i in np.flatnonzero((length < limit) & ~stopped):
            n = length[i]
            scaled = logits[i, n - 1] / (settings.temperature or 1)
            keep = filtered(scaled, settings.top_k, settings.top_p)
            gain = noise[i, n] if settings.temperature else 0
            token = np.argmax(np.where(keep, scaled + gain, -np.inf))
            tokens[i, n] = token
            logps[i, n] = log_softmax(scaled)[token]
            masses[i, n] = np.log(np.exp(log_softmax(scaled))[keep].sum())
            length[i], stopped[i] = n + 1, token == stop
    return base.RolloutBatch(tokens, logps, masses, start, length, stopped)


@functools.partial(jax.jit, static_argnums=1)
def _row_noise(keys, vocab):
    place = jnp.arange(keys.shape[0], dtype=jnp.int32)
    return sampling.gumbel(keys, place, jnp.arange(vocab, dtype=jnp.int32))
