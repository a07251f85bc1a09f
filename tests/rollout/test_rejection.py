"""Speculative sampling by rejection: the target's distribution, whatever was drafted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax.rollout import accept, buckets, decode, generate, inputs, sampling, strategy
from fastgrpo_jax.rollout import engine as engine_lib
from tests.rollout import toys

V, D, N = 5, 2, 40_000


@jax.jit
def sample(p, q, draft_noise, coins, noise):
    """Verify N chains of D drafts drawn from q, under a target that looks at depth alone."""
    draft = jnp.argmax(jnp.log(q) + draft_noise[:, :D], axis=2).astype(jnp.int32)

    def weigh(d):
        target = jnp.broadcast_to(p[d], (N, V))
        return target, lambda token: (jnp.log(p[d])[token], jnp.zeros(N, jnp.float32))

    return draft, accept.reject(draft, weigh, jnp.broadcast_to(q, (N, D, V)), coins, noise)


def distributions(kind):
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(V), D + 1), rng.dirichlet(np.ones(V), D)
    if kind == "equal":
        q = p[:D].copy()
    if kind == "apart":  # no draft can be right
        p[:, :2], q[:, 2:] = 0, 0
    return tuple(jnp.asarray(x / x.sum(-1, keepdims=True), jnp.float64) for x in (p, q))


@pytest.mark.parametrize("kind", ["unlike", "equal", "apart"])
def test_emitted_tokens_have_the_targets_distribution_and_drafts_the_best_chance(kind):
    """Each place's frequencies, and the share taken: sum min(p, q) = 1 - TV (within 5 sigma)."""
    p, q = distributions(kind)
    rng = np.random.default_rng(1)
    noise = [jnp.asarray(rng.gumbel(size=(N, D + 1, V))) for _ in range(2)]
    coins = jnp.asarray(rng.random((N, D)), jnp.float32)
    draft, verdict = jax.device_get(sample(p, q, noise[0], coins, noise[1]))
    for d in range(D + 1):
        there = verdict.count > d
        assert there.sum() == (N if d == 0 else went_on.sum())
        if not there.any():
            break
        seen = np.bincount(verdict.tokens[there, d], minlength=V)
        expected = there.sum() * np.asarray(p[d])
        assert np.all(np.abs(seen - expected) <= 5 * np.sqrt(expected) + 1e-9)
        if d == D:
            break
        rate = np.minimum(p[d], q[d]).sum()
        went = (verdict.count[there] > d + 1).mean()
        assert abs(went - rate) <= 5 * np.sqrt(rate * (1 - rate) / there.sum()) + 1e-9
        went_on = verdict.count > d + 1
        np.testing.assert_array_equal(verdict.tokens[went_on, d], draft[went_on, d])
    np.testing.assert_allclose(verdict.logps[:, 0], np.log(p[0])[verdict.tokens[:, 0]])


def test_no_draft_is_never_taken_and_costs_no_mass():
    p, _ = distributions("unlike")
    rng = np.random.default_rng(2)
    noise = jnp.asarray(rng.gumbel(size=(N, D + 1, V)))
    none = jnp.full((N, D), -1, jnp.int32)

    def weigh(d):
        return jnp.broadcast_to(p[d], (N, V)), lambda token: (token * 1.0, token * 1.0)

    zero = jnp.zeros((N, D, V))
    verdict = accept.reject(none, weigh, zero, jnp.zeros((N, D), jnp.float32), noise)
    assert np.all(verdict.count == 1)
    expected = N * np.asarray(p[0])
    seen = np.bincount(verdict.tokens[:, 0], minlength=V)
    assert np.all(np.abs(seen - expected) <= 5 * np.sqrt(expected))


REJECTION = dataclasses.replace(toys.SPEC, rejection=True)


@pytest.mark.parametrize("text", ["learned:3:1:4", "ngram:2:1:3"])
def test_greedy_tokens_are_those_of_plain_decoding(text):
    """At T 0 both distributions are points, so a draft is taken exactly if it is the target's."""
    greedy = inputs.Settings(0.0)
    found = toys.rollout(toys.engine(REJECTION), toys.weights(), toys.fixed(text), greedy)
    toys.assert_same(found.batch, toys.plain(greedy).batch)


@pytest.mark.parametrize("ids", [None, 20])
@pytest.mark.parametrize("text", ["learned:2:1:3", "ngram:2:1:3"])
def test_sampled_tokens_fit_the_models_own_distribution(text, ids):
    """Of 1,200 rows, at each of three places: as many of each id as its probabilities add up to."""
    count, settings = 1200, inputs.Settings(0.8)
    spec = dataclasses.replace(REJECTION, group=count)
    weights = toys.weights()
    if ids:
        weights = decode.with_draft_vocab(weights, np.arange(0, toys.VOCAB)[:ids])
    limits = engine_lib.Limits(prompt=12, response=3, total=15)
    controller = strategy.constant("x", strategy.parse(text))
    engine = engine_lib.make_engine(
        spec, rows=buckets.row_ladder(count, str(count)), limits=limits, stop_tokens=(toys.NEVER,),
        slot_step=48, rounds=4, span=4,
    )  # fmt: skip
    # 7 11 b 9 7 11: the n-gram drafter says b, which shall be likely.
    prompts = np.array([[7, 11, b, 9, 7, 11] for b in range(toys.VOCAB)], np.int32)
    last = np.asarray(decode.read(spec.policy, weights.policy, jnp.asarray(prompts)))[:, -1]
    prompt = prompts[np.argmax(jax.nn.softmax(last / 0.8)[np.arange(toys.VOCAB), prompts[:, 2]])]
    request = inputs.Request((tuple(prompt.tolist()),), (3,), 5, 2)
    done = generate.rollout(engine, weights, request, settings, limits, controller)
    batch = done.batch
    assert sum(int(b.report.accepted.sum()) for b in done.blocks) > count / 20
    logits = np.asarray(decode.read(spec.policy, weights.policy, jnp.asarray(batch.tokens)))
    start = int(batch.prompt_length[0])
    for place in range(start, start + 3):
        scaled = logits[:, place - 1] / np.float64(np.float32(0.8))
        p = np.exp(scaled - scaled.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        seen = np.bincount(batch.tokens[:, place], minlength=toys.VOCAB)
        sigma = np.sqrt((p * (1 - p)).sum(0))
        assert np.all(np.abs(seen - p.sum(0)) <= 5 * sigma + 3)  # 3: of rare ids
        logp = np.log(p[np.arange(count), batch.tokens[:, place]])
        np.testing.assert_allclose(batch.logps[:, place], logp, atol=1e-5)


def test_streams_of_noise_are_unlike_and_uniform_numbers_fill_the_unit_interval():
    keys = sampling.row_keys(1, 2, np.arange(2000), np.zeros(2000, int))
    place = jnp.full(2000, 7, jnp.int32)
    seen = [np.asarray(sampling.uniform(k, place)) for k in (keys, sampling.stream(keys, 1))]
    seen.append(np.asarray(sampling.uniform(sampling.stream(keys, 2), place)))
    for i, x in enumerate(seen):
        assert x.min() >= 0 and x.max() < 1 and abs(x.mean() - 0.5) < 0.04
        for y in seen[:i]:
            assert abs(np.corrcoef(x, y)[0, 1]) < 0.1
