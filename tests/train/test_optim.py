import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
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


@pytest.mark.parametrize(
    "field, value", [("learning_rate", -1.0), ("b1", 1.0), ("max_grad_norm", 0.0), ("eps", 0.0)]
)
def test_a_field_out_of_range_is_named(field, value):
    with pytest.raises(base.UserError, match=f"{field} is {value}; allowed"):
        optim.OptimConfig(**{field: value})
