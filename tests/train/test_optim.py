import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import policy
from fastgrpo_jax.train import optim


def tree(seed, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(rng.normal(size=(3, 2)), dtype),
        "bias": jnp.asarray(rng.normal(size=2), dtype),
        "scale": jnp.asarray(rng.normal(size=3), dtype),
    }


def test_updates_are_those_of_adamw_written_out():
    """Clipping by the norm of all leaves, decoupled decay off norms and biases, warm-up over 4."""
    config = optim.OptimConfig(
        learning_rate=0.1,
        warmup_steps=4,
        weight_decay=0.3,
        b1=0.8,
        b2=0.95,
        eps=1e-3,
        max_grad_norm=1.5,
    )
    optimizer = optim.make_optimizer(config)
    params = tree(0)
    state = optimizer.init(params)
    expected = {k: np.asarray(v) for k, v in params.items()}
    m = {k: 0.0 for k in params}
    v = {k: 0.0 for k in params}
    for step in range(1, 7):
        grads = jax.tree.map(lambda g, s=step: g * (0.1 if s == 2 else 1), tree(step))
        norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in grads.values()))
        rate = 0.1 * min(step / 4, 1)
        np.testing.assert_allclose(optim.learning_rate(config, state), rate, rtol=1e-6)
        for k in params:
            g = np.asarray(grads[k]) * min(1, 1.5 / norm)
            m[k] = 0.8 * m[k] + 0.2 * g
            v[k] = 0.95 * v[k] + 0.05 * g * g
            delta = m[k] / (1 - 0.8**step) / (np.sqrt(v[k] / (1 - 0.95**step)) + 1e-3)
            decay = 0.3 * expected[k] if k == "kernel" else 0
            expected[k] = expected[k] - rate * (delta + decay)
        params, state, grad_norm, applied = optim.guarded_update(
            optimizer, jnp.array(1.0), grads, params, state
        )
        assert applied
        np.testing.assert_allclose(grad_norm, norm, rtol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-8), params, expected)


def newton_schulz(g):
    """Make the singular values of a matrix about 1: five steps of a quintic polynomial."""
    wide = g.shape[0] > g.shape[1]
    x = (g.T if wide else g) / (np.linalg.norm(g) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.T if wide else x


def test_muons_matrices_move_by_orthogonal_steps_and_the_rest_by_adam():
    """Momentum .95 with Nesterov's look ahead; wide outputs move more, by sqrt(out / in)."""
    config = optim.OptimConfig("muon", learning_rate=0.1, max_grad_norm=1e9)
    rng = np.random.default_rng(0)
    shapes = {"embed": (5, 3), "head": (5, 3), "tall": (3, 2), "wide": (2, 8), "norm": (3,)}
    params = {k: jnp.asarray(rng.normal(size=s)) for k, s in shapes.items()}
    optimizer = optim.make_optimizer(config)
    adam = optim.make_optimizer(dataclasses.replace(config, optimizer="adamw"))
    state, adam_state, momentum = optimizer.init(params), adam.init(params), {}
    for step in range(1, 4):
        grads = {k: jnp.asarray(rng.normal(size=s)) for k, s in shapes.items()}
        delta, state = optimizer.update(grads, state, params)
        other, adam_state = adam.update(grads, adam_state, params)
        for k in ("tall", "wide"):
            g = np.asarray(grads[k])
            momentum[k] = 0.95 * momentum.get(k, 0) + 0.05 * g
            fixed = 0.95 * momentum[k] / (1 - 0.95 ** (step + 1)) + 0.05 * g / (1 - 0.95**step)
            scale = max(1, g.shape[1] / g.shape[0]) ** 0.5
            np.testing.assert_allclose(delta[k], -0.1 * scale * newton_schulz(fixed), atol=1e-6)
        for k in ("embed", "head", "norm"):
            if step == 1:  # later ones look ahead, as plain Adam does not
                np.testing.assert_array_equal(np.sign(delta[k]), np.sign(other[k]))
        assert optim.updates(state) == step
        np.testing.assert_allclose(optim.learning_rate(config, state), 0.1, rtol=1e-6)


@pytest.mark.parametrize("where", ["loss nan", "grad nan", "grad inf", "norm overflow"])
def test_a_non_finite_update_changes_nothing_bitwise(where):
    optimizer = optim.make_optimizer(optim.OptimConfig(learning_rate=0.1, weight_decay=0.1))
    params = tree(0, np.float32)
    params, state, _, _ = optim.guarded_update(
        optimizer, jnp.float32(1), tree(1, np.float32), params, optimizer.init(params)
    )
    bad = {"grad nan": jnp.nan, "grad inf": jnp.inf, "norm overflow": 1e30}.get(where, 1.0)
    grads = tree(2, np.float32)
    grads["bias"] = grads["bias"].at[0].set(bad)
    loss = jnp.float32(jnp.nan if where == "loss nan" else 1)
    new = jax.jit(optim.guarded_update, static_argnums=0)(optimizer, loss, grads, params, state)
    assert not new.applied
    jax.tree.map(np.testing.assert_array_equal, new.params, params)
    jax.tree.map(np.testing.assert_array_equal, new.opt_state, state)


def test_a_small_rate_still_moves_float32_masters():
    """F9: 1e-6 beside weights of 0.02, below half a bfloat16 spacing."""
    optimizer = optim.make_optimizer(optim.OptimConfig(learning_rate=1e-6))
    params = {"kernel": jnp.full((2, 2), 0.02, jnp.float32)}
    new = optim.guarded_update(
        optimizer, jnp.float32(1), params, params, optimizer.init(params)
    ).params["kernel"]
    assert new.dtype == jnp.float32
    np.testing.assert_allclose(params["kernel"] - new, 1e-6, rtol=1e-2)
    np.testing.assert_array_equal(new.astype(jnp.bfloat16), params["kernel"].astype(jnp.bfloat16))


def rates_of(config, counts):
    """Return the rate before each update, as told and as an update of gradient 1 shows it."""
    optimizer = optim.make_optimizer(config)
    params = {"x": jnp.zeros(1)}
    start, told, done = optimizer.init(params), [], []
    for count in counts:
        state = jax.tree.map(
            lambda x, c=count: jnp.array(c, x.dtype) if x.dtype == jnp.int32 else x, start
        )
        told.append(float(optim.learning_rate(config, state)))
        done.append(optimizer.update({"x": jnp.ones(1)}, state, params)[0]["x"][0])
    moments = [adam_scale(config, count) for count in counts]
    np.testing.assert_allclose(-np.array(done) / moments, told, rtol=1e-5, atol=1e-12)
    return told


def adam_scale(config, count):
    """Return Adam's step for a first gradient of 1 at a count, all moments being 0 before."""
    m = (1 - config.b1) / (1 - config.b1 ** (count + 1))
    v = (1 - config.b2) / (1 - config.b2 ** (count + 1))
    return m / (np.sqrt(v) + config.eps)


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("schedule", optim.SCHEDULES)
def test_the_rate_rises_for_the_warm_up_and_then_follows_its_schedule(schedule, warmup):
    """Written out update by update: 8 in all, and three beyond, at which the rate stays 0."""
    decays = schedule != "constant"
    config = optim.OptimConfig(
        learning_rate=0.1, schedule=schedule, warmup_steps=warmup, decay_steps=8 if decays else 0
    )
    expected = []
    for count in range(11):
        left = (8 - count) / (8 - warmup)  # of the decay
        if count < warmup:
            expected.append(0.1 * (count + 1) / warmup)
        elif schedule == "constant":
            expected.append(0.1)
        elif count >= 8:
            expected.append(0.0)
        elif schedule == "linear":
            expected.append(0.1 * left)
        else:
            expected.append(0.1 * (1 + np.cos(np.pi * (1 - left))) / 2)
    np.testing.assert_allclose(rates_of(config, range(11)), expected, rtol=1e-5, atol=1e-9)


def policy_tree(**changes):
    c = base.PolicyConfig(
        vocab=11, hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=12, max_positions=16,
        qkv_bias=True, qk_norm=True, **changes,
    )  # fmt: skip
    shapes = jax.eval_shape(lambda: policy.init(jax.random.key(0), c))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), shapes)


def test_decay_leaves_out_norms_biases_and_the_embedding():
    params = policy_tree(tied=False)
    config = optim.OptimConfig(learning_rate=1.0, weight_decay=0.25)
    optimizer = optim.make_optimizer(config)
    zeros = jax.tree.map(jnp.zeros_like, params)
    new = optim.guarded_update(optimizer, jnp.array(0.0), zeros, params, optimizer.init(params))
    for path, before in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        after = new.params
        for entry in path:
            after = after[entry.key]
        shrinks = name == "['head']" or name.endswith("['kernel']")
        np.testing.assert_allclose(after, before * (0.75 if shrinks else 1), err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_the_norms_of_the_parts_are_those_of_their_leaves(tied):
    grads = policy_tree(tied=tied)
    flat = jax.tree_util.tree_leaves_with_path(grads)
    parts = {"embed": 0.0, "head": 0.0, "attention": 0.0, "mlp": 0.0, "norms": 0.0}
    for path, leaf in flat:
        name = jax.tree_util.keystr(path)
        part = "norms"
        for hint, its in (
            ("embed", "embed"),
            ("head", "head"),
            ("'attn'", "attention"),
            ("'mlp'", "mlp"),
        ):
            if hint in name:
                part = its
        parts[part] += float((np.asarray(leaf) ** 2).sum())
    if tied:
        del parts["head"]
    got = optim.norms_by_part(grads)
    assert got.keys() == parts.keys()
    for part, square in parts.items():
        assert square > 0
        np.testing.assert_allclose(got[part] ** 2, square, rtol=1e-12)


def test_a_bfloat16_first_moment_halves_its_memory_and_hardly_changes_the_update():
    exact = optim.OptimConfig(learning_rate=0.1)
    rounded = dataclasses.replace(exact, mu_dtype="bfloat16")
    ends = []
    for config in (exact, rounded):
        optimizer = optim.make_optimizer(config)
        params = tree(0, np.float32)
        state = optimizer.init(params)
        for step in range(1, 4):
            params, state, _, _ = optim.guarded_update(
                optimizer, jnp.float32(1), tree(step, np.float32), params, state
            )
        ends.append((params, state))
    (plain, full), (close, half) = ends
    assert {x.dtype for x in jax.tree.leaves(full[1].mu)} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(half[1].mu)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(half[1].nu)} == {jnp.dtype("float32")}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-3), plain, close)


def test_updates_are_counted_without_the_skipped_ones():
    optimizer = optim.make_optimizer(optim.OptimConfig())
    params = tree(0)
    state = optimizer.init(params)
    for loss in (1.0, jnp.nan, 1.0):
        params, state, _, _ = optim.guarded_update(
            optimizer, jnp.array(loss), tree(1), params, state
        )
    assert optim.updates(state) == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(learning_rate=-1.0), "learning_rate is -1.0; allowed: 0 or more"),
        (dict(b1=1.0), r"b1 is 1.0; allowed: \[0, 1\)"),
        (dict(max_grad_norm=0.0), "max_grad_norm is 0.0; allowed: above 0"),
        (dict(eps=0.0), "eps is 0.0; allowed: above 0"),
        (dict(schedule="cosin"), "schedule is 'cosin'; allowed: constant, linear, cosine"),
        (dict(schedule="linear"), "decay_steps is 0; allowed: above optim.warmup_steps = 0"),
        (
            dict(schedule="cosine", warmup_steps=5, decay_steps=5),
            "decay_steps is 5; allowed: above optim.warmup_steps = 5",
        ),
        (dict(decay_steps=5), "decay_steps is 5; allowed: 0, since a constant rate"),
        (dict(mu_dtype="int8"), "mu_dtype is 'int8'; allowed: bfloat16, or empty"),
    ],
)
def test_a_field_out_of_range_is_named_with_what_is_allowed(changes, message):
    with pytest.raises(base.UserError, match="optim." + message):
        optim.OptimConfig(**changes)
