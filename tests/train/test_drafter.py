"""The drafter's training forward, and its training alone on features that were kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.train import distill, drafter, forward, grpo, layout, optim, step

V, G, LP, R, J = 31, 2, 6, 4, 3
POLICY = base.PolicyConfig(
    vocab=V, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, max_positions=64,
    dtype="float64",
)  # fmt: skip
PROMPTS = (6, 3, 1)  # the last has a single token: most of its drafts have no true pair
LENGTHS = (4, 1, 0, 3, 4, 2)


SHAPES = {kind: eagle.config_for(POLICY, kind) for kind in eagle.KINDS}
SHAPES |= {"three depths": dataclasses.replace(SHAPES["fastgrpo"], taps=(0, 1, 1))}


def config(kind="fastgrpo", unroll=1, group=G, **changes):
    return drafter.Config(
        frame=forward.Frame(POLICY, group, LP, R),
        eagle=SHAPES[kind],
        optim=optim.OptimConfig(learning_rate=1e-2),
        distill=distill.DistillConfig(unroll=unroll, **changes),
        head_chunk=5,
    )


@functools.cache
def weights(kind="fastgrpo"):
    made = (
        policy.init(jax.random.key(0), POLICY),
        eagle.init(jax.random.key(1), SHAPES[kind]),
    )
    return jax.tree.map(lambda x: jnp.asarray(x * 10 if x.ndim > 1 else x, jnp.float64), made)


def batch():
    rng = np.random.default_rng(1)
    prompts = np.repeat(PROMPTS, G).astype(np.int32)
    tokens = rng.integers(0, V, (len(prompts), LP + R)).astype(np.int32)
    for i, length in enumerate(prompts):
        tokens[i, :length] = tokens[i // G * G, :length]
    return layout.StepBatch(
        tokens=jnp.asarray(tokens),
        prompt_length=jnp.asarray(prompts),
        length=jnp.asarray(prompts + np.array(LENGTHS, np.int32)),
        logps=jnp.zeros(tokens.shape, jnp.float32),
        advantages=jnp.ones(len(prompts), jnp.float32),
        temperature=jnp.ones(len(prompts), jnp.float32),
    )


def lesson(c, b):
    return drafter.read(c, weights()[0], b)


@functools.partial(jax.jit, static_argnums=0)
def apply_padded(kind, params, features, embeds):
    place = jnp.arange(len(features), dtype=jnp.int32)
    out = eagle.Eagle(SHAPES[kind]).apply(
        {"params": params},
        features[None],
        embeds[None],
        place[None],
        (place[:, None] >= place)[None],
    )
    return out[0][0], out[1][0]


def apply(kind, features, tokens):
    """Run the drafter over pairs 0, 1, ... of one sequence; returns its last outputs.

    What was read of three depths is merged here, so that estimates can stand beside it.
    """
    count = len(features)
    padded = np.zeros((LP + R, POLICY.hidden))
    params, embed = weights(kind)[1], np.asarray(weights()[0]["embed"])
    for i, x in enumerate(features):
        padded[i] = x if len(x) == POLICY.hidden else x @ np.asarray(params["merge"]["kernel"])
    out = apply_padded(kind, params, jnp.asarray(padded), jnp.asarray(embed[np.roll(tokens, -1)]))
    return [np.asarray(x[count - 1]) for x in out]


@functools.partial(jax.jit, static_argnums=2)
def read_plainly(params, tokens, taps):
    place = jnp.arange(len(tokens), dtype=jnp.int32)
    causal = (place[:, None] >= place)[None]
    model = policy.Policy(POLICY, taps=taps)
    return model.apply({"params": params}, tokens[None], place[None], causal).tapped[0]


@pytest.mark.parametrize("group", [1, G])
@pytest.mark.parametrize("kind", SHAPES)
def test_unrolled_steps_are_chains_of_drafts_made_one_by_one(kind, group):
    """Step j of a token: true features up to the pair j before its own, then estimates."""
    b, c = batch(), config(kind, J, group)
    places = layout.locate(b, R, "grpo")
    kept = drafter.read(c, weights()[0], b)
    rows = c.frame.rows(b, places)
    drafts = forward.draft(c.eagle, weights(kind)[1], weights()[0]["embed"], kept.tapped, rows, J)
    found = [layout.per_sequence(x, rows, places) for x in drafts]
    used = np.asarray(forward.unrolled_weights(places, J)) > 0
    drafted = layout.per_sequence(forward.drafted(rows, J), rows, places)
    np.testing.assert_array_equal(used, drafted)
    seen = 0
    for n, (start, end) in enumerate(zip(b.prompt_length, b.length)):
        tokens = np.asarray(b.tokens[n])
        true = np.asarray(read_plainly(weights()[0], b.tokens[n], c.eagle.taps))
        for i in range(int(start), int(end)):
            for j in range(J):
                assert used[n, i - int(start), j] == (i - 2 - j >= 0)
                if i - 2 - j < 0:
                    continue
                features = list(true[: i - 1 - j])
                for _ in range(j):
                    features.append(apply(kind, features, tokens)[0])
                for ours, theirs in zip(found, apply(kind, features, tokens), strict=True):
                    np.testing.assert_allclose(ours[n, i - int(start), j], theirs, atol=1e-9)
                seen += 1
    assert seen == 30


@pytest.mark.parametrize(
    "kind, unroll, ids",
    [("fastgrpo", 1, None), ("fastgrpo", 2, (1, 2, 3, 5, 8, 13, 21)), ("three depths", 2, None)],
)
def test_the_drafter_alone_learns_by_the_fused_steps_gradient(kind, unroll, ids):
    """Over all ids, and over those of a draft vocabulary."""
    c, b = config(kind, unroll), batch()
    ids = None if ids is None else jnp.array(ids, jnp.int32)
    fused = step.StepConfig(
        policy=POLICY,
        eagle=c.eagle,
        loss=grpo.LossConfig(),
        optim=optim.OptimConfig(),
        drafter_optim=c.optim,
        distill=c.distill,
        max_response=R,
        max_prompt=LP,
        group=G,
    )
    params, head = weights(kind)
    gradients = jax.jit(step.gradients, static_argnums=0)
    state = step.init_state(fused, *weights(kind))
    _, expected, terms, _ = gradients(fused, state, b._replace(draft_ids=ids))
    frozen, own = drafter.freeze(params, ids), jax.tree.map(jnp.array, head)
    new, loss = drafter.update(c, frozen, drafter.init(c, own), lesson(c, b))
    np.testing.assert_allclose(loss, terms.drafter_loss, rtol=1e-9)
    optimizer = optim.make_optimizer(c.optim)
    update = optim.guarded_update(optimizer, loss, expected, head, optimizer.init(head))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9),
        update.params,
        new.params,
    )
    acceptance = drafter.examine(c, frozen, head, lesson(c, b))
    np.testing.assert_allclose(acceptance[0], terms.acceptance, rtol=1e-9)


def test_training_on_a_draft_vocabulary_raises_the_acceptance_at_every_step():
    b = batch()
    c = config(unroll=2, feature_weight=0.2, token_weight=1.0)
    params, head = weights()
    frozen = drafter.freeze(params, jnp.array([1, 2, 3, 5, 8, 13, 21]))
    state, known = drafter.init(c, jax.tree.map(jnp.array, head)), lesson(c, b)
    before = drafter.examine(c, frozen, state.params, known)
    for _ in range(60):
        state, _ = drafter.update(c, frozen, state, known)
    after = drafter.examine(c, frozen, state.params, known)
    assert np.all(np.asarray(after) > np.asarray(before) + 0.1)


def test_a_non_finite_update_leaves_the_drafter_as_it_was():
    c, b = config(), batch()
    params, head = weights()
    known = lesson(c, b)
    known = known._replace(tapped=known.tapped.at[0, 0].set(jnp.nan))
    state = drafter.init(c, jax.tree.map(jnp.array, head))
    new, loss = drafter.update(c, drafter.freeze(params), state, known)
    assert np.isnan(loss)
    jax.tree.map(np.testing.assert_array_equal, new.params, head)
