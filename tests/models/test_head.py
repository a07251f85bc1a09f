import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax.models import head

N, E, V = 11, 6, 17


def inputs(dtype=np.float64):
    rng = np.random.default_rng(0)
    return dict(
        features=jnp.asarray(rng.normal(size=(N, E)), dtype),
        table=jnp.asarray(rng.normal(size=(V, E)), dtype),
        hidden=jnp.asarray(rng.normal(size=(N, 2, E)), dtype),
        targets=jnp.asarray(rng.integers(0, V, N), jnp.int32),
        temperature=jnp.asarray(rng.choice([0.0, 0.6, 1.0, 1.7], N), jnp.float32),
    )


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def longhand(features, table, hidden, targets, temperature):
    logps, entropy, ce, tv = [], [], [], []
    for f, h, y, t in zip(*(np.asarray(x) for x in (features, hidden, targets, temperature))):
        logits = np.asarray(table) @ f
        p = softmax(logits / (float(t) if t else 1.0))
        logps.append(np.log(p[y]))
        entropy.append(-(p * np.log(p)).sum())
        drafts = [softmax(np.asarray(table) @ x) for x in h]
        ce.append([-(softmax(logits) * np.log(q)).sum() for q in drafts])
        tv.append([1 - np.minimum(softmax(logits), q).sum() for q in drafts])
    return tuple(np.array(x) for x in (logps, entropy, ce, tv))


@functools.partial(jax.jit, static_argnames="chunk")
def score(features, table, targets, temperature, chunk, hidden):
    return head.score(features, table, targets, temperature, chunk, hidden)


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
def test_scores_are_those_of_the_formulas_for_every_chunk(chunk):
    """C7, C11, C18: own token, own temperature (0 is 1), with and without a last short chunk."""
    x = inputs()
    for ours, theirs in zip(jax.tree.leaves(score(**x, chunk=chunk)), longhand(**x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11)


def test_drafts_are_compared_within_a_draft_vocabulary():
    x = inputs()
    few = {**x, "table": x["table"][jnp.array([0, 3, 4, 9])], "targets": x["targets"] * 0}
    ours = head.score_drafts(x["features"], few["table"], x["hidden"], 4)
    for found, theirs in zip(ours, longhand(**few)[2:], strict=True):
        np.testing.assert_allclose(found, theirs, rtol=1e-11)


def test_drafts_are_compared_among_some_ids_while_the_policy_is_scored_over_all():
    """The same drafts' scores as over a table of those ids, values and gradients."""
    x, ids = inputs(), jnp.array([0, 3, 4, 9])
    whole = longhand(**x)

    def fused(hidden, table):
        found = head.score(x["features"], table, x["targets"], x["temperature"], 4, hidden, ids)
        return jnp.sum(found.draft.ce + 2 * found.draft.tv), found

    def alone(hidden):
        found = head.score_drafts(x["features"], x["table"][ids], hidden, 4)
        return jnp.sum(found.ce + 2 * found.tv), found

    (ours, of_table), found = jax.grad(fused, (0, 1), has_aux=True)(x["hidden"], x["table"])
    theirs, expected = jax.grad(alone, has_aux=True)(x["hidden"])
    np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-14)
    np.testing.assert_array_equal(of_table, 0)
    for a, b in zip((found.logps, found.entropy, *found.draft), (*whole[:2], *expected)):
        np.testing.assert_allclose(a, b, rtol=1e-11)


@pytest.mark.parametrize("count", [0, 3, 4, 5, 11])
def test_chunks_after_the_tokens_that_are_wanted_give_nothing_and_get_no_gradient(count):
    x = inputs()
    wanted = jnp.arange(N) < count

    def loss(features, table, hidden, count):
        out = head.score(features, table, x["targets"], x["temperature"], 4, hidden, count=count)
        kept = jax.tree.map(lambda s: jnp.where(wanted.reshape(-1, *[1] * (s.ndim - 1)), s, 0), out)
        return sum(map(jnp.sum, jax.tree.leaves(kept))), (out, kept)

    grad = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    args = x["features"], x["table"], x["hidden"]
    ours, (out, kept) = grad(*args, jnp.int32(count))
    theirs, (_, expected) = grad(*args, None)
    jax.tree.map(np.testing.assert_array_equal, kept, expected)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    first = -(-count // 4) * 4
    assert all(not np.any(leaf[first:]) for leaf in jax.tree.leaves(out))


def test_chunked_gradients_are_those_of_the_whole():
    """C18"""
    x = inputs()
    weight = jnp.asarray(np.random.default_rng(1).normal(size=N))

    def whole(features, table, hidden):
        logits = features @ table.T
        temperature = jnp.where(x["temperature"] == 0, 1, x["temperature"])[:, None]
        logps = jax.nn.log_softmax(logits / temperature)[jnp.arange(N), x["targets"]]
        target = jax.nn.softmax(jax.lax.stop_gradient(logits))
        drafted = jax.nn.log_softmax(hidden @ jax.lax.stop_gradient(table).T)
        ce = -jnp.sum(target[:, None] * drafted, axis=2)
        tv = 1 - jnp.sum(jnp.minimum(target[:, None], jnp.exp(drafted)), axis=2)
        return jnp.sum(weight * (logps + 3 * ce[:, 0] - ce[:, 1] + 2 * tv.sum(axis=1)))

    def chunked(features, table, hidden):
        out = head.score(features, table, x["targets"], x["temperature"], 4, hidden)
        ce, tv = out.draft
        return jnp.sum(weight * (out.logps + 3 * ce[:, 0] - ce[:, 1] + 2 * tv.sum(axis=1)))

    args = x["features"], x["table"], x["hidden"]
    for ours, theirs in zip(
        jax.jit(jax.grad(chunked, (0, 1, 2)))(*args), jax.grad(whole, (0, 1, 2))(*args)
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_the_drafter_and_the_entropy_send_no_gradient_to_the_policy():
    """E10: with a NaN drafter too."""
    x = inputs()

    def loss(features, table, hidden):
        out = head.score(features, table, x["targets"], x["temperature"], 4, hidden)
        return jnp.sum(out.draft.ce + out.draft.tv) + jnp.sum(out.entropy)

    grad = jax.jit(jax.grad(loss, (0, 1)))
    for hidden in (x["hidden"], jnp.full_like(x["hidden"], jnp.nan)):
        for g in grad(x["features"], x["table"], hidden):
            np.testing.assert_array_equal(g, 0)


def test_bfloat16_features_give_float32_scores():
    x = inputs(jnp.bfloat16)
    wide = {k: np.asarray(x[k], np.float64) for k in ("features", "table", "hidden")}
    exact = longhand(**{**x, **wide})
    for ours, theirs in zip(jax.tree.leaves(score(**x, chunk=4)), exact, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, atol=3e-5)
