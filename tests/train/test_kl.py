"""What each KL estimator is in expectation, by enumeration: values, and gradients in a loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax.train import grpo, kl

rng = np.random.default_rng(0)
LOGITS, REFERENCE = (jnp.asarray(rng.normal(size=5)) for _ in range(2))
SECOND, SECOND_REFERENCE = (jnp.asarray(rng.normal(size=(5, 5))) for _ in range(2))


def reverse(logits, reference):
    """KL(policy || reference), the divergence of the penalty."""
    p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def forward(logits, reference):
    """KL(reference || policy)."""
    return reverse(reference, logits)


def nothing(logits, reference):
    return jnp.zeros(logits.shape[:-1])


OBJECTIVES = {"k1": nothing, "k2": reverse, "k3": forward}


def term(kind, logits, reference, token):
    """Compute the loss of one sampled token that has no advantage: its KL term alone."""
    logp = jax.nn.log_softmax(logits)[token].reshape(1, 1)
    other = jax.nn.log_softmax(reference)[token].reshape(1, 1)
    old, zero = jax.lax.stop_gradient(logp), jnp.zeros(1)
    config = grpo.LossConfig(kl_beta=1.0, kl_estimator=kind)
    return grpo.policy_loss(logp, old, zero, jnp.ones((1, 1)), config, other)[0]


@pytest.mark.parametrize("kind", kl.ESTIMATORS)
def test_the_expected_value_is_the_divergence_but_for_k2(kind):
    p, q = np.asarray(jax.nn.softmax(LOGITS)), np.asarray(jax.nn.softmax(REFERENCE))
    values = [float(term(kind, LOGITS, REFERENCE, i)) for i in range(5)]
    expected = sum(p * np.log(p / q)) if kind != "k2" else sum(p * np.log(p / q) ** 2) / 2
    np.testing.assert_allclose(sum(p * values), expected, rtol=1e-6)
    assert min(values) >= 0 or kind == "k1"


@pytest.mark.parametrize("kind", kl.ESTIMATORS)
def test_the_expected_gradient_is_none_or_the_reverse_or_the_forward_divergences(kind):
    """C12: k1 none; k2 the divergence's own; k3 that of KL(reference || policy), a biased one."""
    p = jax.nn.softmax(LOGITS)
    grads = jnp.stack([jax.grad(term, 1)(kind, LOGITS, REFERENCE, i) for i in range(5)])
    expected = jax.grad(OBJECTIVES[kind])(LOGITS, REFERENCE)
    np.testing.assert_allclose(p @ grads, expected, atol=1e-7)
    assert np.abs(grads).max() > 0.1
    others = {k: jax.grad(f)(LOGITS, REFERENCE) for k, f in OBJECTIVES.items() if k != kind}
    assert all(np.abs(p @ grads - other).max() > 0.01 for other in others.values())


@pytest.mark.parametrize("kind", kl.ESTIMATORS)
def test_over_sequences_the_gradient_is_that_of_each_token_given_its_prefix(kind):
    """All 25 sequences of two tokens; the prefix's own probability is not differentiated."""
    objective = OBJECTIVES[kind]
    p = jax.nn.softmax(LOGITS)
    then = jax.nn.softmax(SECOND)

    def sampled(first, second, a, b):
        return term(kind, first, REFERENCE, a) + term(kind, second[a], SECOND_REFERENCE[a], b)

    def exact(first, second):
        return objective(first, REFERENCE) + p @ objective(second, SECOND_REFERENCE)

    grad = jax.vmap(jax.grad(sampled, (0, 1)), (None, None, 0, 0))
    a, b = (x.reshape(-1) for x in jnp.meshgrid(jnp.arange(5), jnp.arange(5), indexing="ij"))
    chance = p[a] * then[a, b]
    found = [jnp.tensordot(chance, g, 1) for g in grad(LOGITS, SECOND, a, b)]
    for ours, theirs in zip(found, jax.grad(exact, (0, 1))(LOGITS, SECOND)):
        np.testing.assert_allclose(ours, theirs, atol=1e-7)
