"""The three ways of drafting K children, against exact sums and simulation on small vocabularies."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax.models import eagle
from fastgrpo_jax.rollout import decode, pairs, speculate
from tests.rollout import toys

P = np.array([[0.4, 0.35, 0.15, 0.1], [0.25, 0.25, 0.25, 0.25]], np.float32)
Q = np.array([[0.3, 0.1, 0.35, 0.25], [0.7, 0.1, 0.1, 0.1]], np.float32)


def exact_rejection(p, q, width: int) -> float:
    """Sum over all orders in which `width` ids are drawn without replacement."""
    total = 0.0
    for order in itertools.permutations(range(len(p)), width):
        target, draft, chance, going = p.astype(float), q.astype(float), 1.0, 1.0
        accepted = 0.0
        for x in order:
            chance *= draft[x]
            accept = min(1.0, target[x] / draft[x])
            accepted += going * accept
            going *= 1 - accept
            target = np.maximum(target - draft, 0)
            target = target / max(target.sum(), 1e-30)
            draft = np.where(np.arange(len(p)) == x, 0, draft)
            draft = draft / max(draft.sum(), 1e-30)
        total += chance * accepted
    return total


def test_rejection_of_one_draw_accepts_all_but_the_total_variation():
    for p, q in zip(P, Q):
        tv = 0.5 * np.abs(p - q).sum()
        assert exact_rejection(p, q, 1) == pytest.approx(1 - tv)


def test_many_draws_give_the_exact_chances():
    found = pairs.compare(
        jnp.asarray(P), jnp.asarray(Q), jnp.arange(2, dtype=jnp.uint32), (1, 2, 3), 20_000
    )
    for i, (p, q) in enumerate(zip(P, Q)):
        wanted = [exact_rejection(p, q, k) for k in (1, 2, 3)]
        np.testing.assert_allclose(found["rejection"][i], wanted, atol=0.01)
        order = np.argsort(-q, kind="stable")
        np.testing.assert_allclose(found["greedy"][i], np.cumsum(p[order])[:3], atol=1e-6)
    np.testing.assert_allclose(found["tv"], 0.5 * np.abs(P - Q).sum(1), atol=1e-6)
    np.testing.assert_allclose(found["entropy"], -(P * np.log(P)).sum(1), rtol=1e-6)
    assert np.all(np.diff(found["shared_noise"], axis=1) >= 0)


def test_shared_noise_always_hits_where_the_drafter_is_the_target():
    found = pairs.compare(
        jnp.asarray(P), jnp.asarray(P), jnp.arange(2, dtype=jnp.uint32), (1, 2), 100
    )
    assert np.all(np.asarray(found["shared_noise"]) == 1)
    np.testing.assert_allclose(found["rejection"], 1, atol=1e-6)


def test_shared_noise_of_one_child_is_the_chance_of_equal_draws():
    """Of Gumbel maxima with common noise: sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)."""
    found = pairs.compare(
        jnp.asarray(P), jnp.asarray(Q), jnp.arange(2, dtype=jnp.uint32), (1,), 20_000
    )
    for i, (p, q) in enumerate(zip(P, Q)):
        ratio = np.maximum(p[None] / p[:, None], q[None] / q[:, None])
        wanted = np.sum(1 / ratio.sum(1))
        assert found["shared_noise"][i, 0] == pytest.approx(wanted, abs=0.01)


@pytest.mark.parametrize("spec", (toys.SPEC,), ids=("fastgrpo",))
def test_a_chain_is_read_as_it_would_be_drafted(spec):
    """At depth d each place sees true pairs, then the estimates of its own chain, no others."""
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(0, toys.VOCAB, (2, 9)), jnp.int32)
    weights = toys.weights()
    learned = speculate.learned(weights)
    read = decode.read_chain(spec.policy, spec.eagle, learned, weights.policy, tokens, 3)
    embeds = np.asarray(learned.embed)[np.asarray(jnp.roll(tokens, -1, axis=1))]
    features = np.asarray(read.features)
    for t in range(3, 8):
        given = features[:, : t + 1].copy()
        for d in range(3):  # drafting from place t - d on, the true tokens being what is drafted
            at = t - d
            own = given[:, : at + 1].copy()
            for step in range(d + 1):
                place = at + step
                out = apply(spec.eagle, learned.params, own, embeds[:, : place + 1])
                if step < d:
                    own = np.concatenate([own, out[0][:, -1:]], axis=1)
            np.testing.assert_allclose(read.hidden[d][:, t], out[1][:, -1], atol=2e-5)


def apply(config, params, features, embeds):
    span = features.shape[1]
    place = jnp.arange(span, dtype=jnp.int32)
    causal = jnp.broadcast_to(place[:, None] >= place, (2, span, span))
    positions = jnp.broadcast_to(place, (2, span))
    out = eagle.Eagle(config).apply(
        {"params": params}, jnp.asarray(features), jnp.asarray(embeds), positions, causal
    )
    return jax.device_get(out[:2])
