import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.train import distill, grpo, optim, step

V, N, T, R = 53, 4, 10, 6
POLICY = base.PolicyConfig(
    vocab=V, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=24, max_positions=64
)
CONFIG = step.StepConfig(
    policy=POLICY,
    eagle=eagle.config_for(POLICY, "fastgrpo"),
    loss=grpo.LossConfig(),
    optim=optim.OptimConfig(learning_rate=1e-2),
    drafter_optim=optim.OptimConfig(learning_rate=1e-2, max_grad_norm=0.5),
    distill=distill.DistillConfig(),
    max_response=R,
    head_chunk=5,  # 24 places: the last chunk is short
)


def in_float64(config, **changes):
    wide = dataclasses.replace(config.policy, dtype="float64")
    drafter = dataclasses.replace(config.eagle, dtype="float64")
    return dataclasses.replace(config, policy=wide, eagle=drafter, **changes)


@functools.cache
def raw_params():
    params = policy.init(jax.random.key(0), POLICY)
    drafter = eagle.init(jax.random.key(1), CONFIG.eagle)
    # Ten times the usual deviation: distributions and features are then far from uniform.
    return jax.tree.map(lambda x: np.asarray(x * 10 if x.ndim > 1 else x), (params, drafter))


def new_state(config):
    return step.init_state(config, *raw_params())


def batch(**changes):
    """Unequal lengths; row 1 has a one-token prompt, row 3 no response at all."""
    rng = np.random.default_rng(0)
    values = dict(
        tokens=jnp.asarray(rng.integers(0, V, (N, T)), jnp.int32),
        prompt_length=jnp.array([3, 1, 4, 5], jnp.int32),
        length=jnp.array([9, 4, 10, 5], jnp.int32),
        logps=jnp.asarray(rng.normal(-3, 0.1, (N, T)), jnp.float32),
        advantages=jnp.array([1.0, -0.5, 0.25, 3.0], jnp.float32),
        temperature=jnp.array([1.0, 0.6, 0.0, 1.0], jnp.float32),
    )
    return step.StepBatch(**{**values, **changes})


train_step = step.make_train_step(CONFIG)
gradients = jax.jit(step.gradients, static_argnums=0)
equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)


def host(tree):
    return jax.tree.map(np.array, tree)


@pytest.fixture(scope="module")
def one_step():
    state, metrics = train_step(new_state(CONFIG), batch())
    return host(state), host(metrics)


def longhand(config, params, drafter, reference, b):
    """Compute (loss, drafter loss) row by row from whole logits, with textbook formulas."""
    wide = jnp.float64

    def run(weights, tokens):
        count = len(tokens)
        place, mask = jnp.arange(count)[None], jnp.tril(jnp.ones((1, count, count), bool))
        out, _ = policy.Policy(config.policy).apply({"params": weights}, tokens[None], place, mask)
        return out[0], place, mask

    rows, drafter_rows, lengths = [], [], []
    for n in range(N):
        start, end = int(b.prompt_length[n]), int(b.length[n])
        tokens = b.tokens[n, :end]  # the padding is cut off
        f, place, mask = run(params, tokens)
        table = params["embed"]
        heat = wide(b.temperature[n] or 1.0)
        logps = jax.nn.log_softmax(f @ table.T / heat)
        f0 = jax.lax.stop_gradient(f)
        frozen = jax.lax.stop_gradient(table)
        pairs = (f0[None, :-1], frozen[tokens[1:]][None], place[:, :-1], mask[:, :-1, :-1])
        following, hidden, _ = eagle.Eagle(config.eagle).apply({"params": drafter}, *pairs)
        losses, drafter_losses = [], []
        for i in range(start, end):
            logp = logps[i - 1, tokens[i]]
            ratio = jnp.exp(logp - jax.lax.stop_gradient(logp))
            kl = 0
            if config.loss.kl_beta:
                g, _, _ = run(reference, tokens)
                ahead = jax.nn.log_softmax(g @ reference["embed"].T / heat)[i - 1, tokens[i]] - logp
                kl = jnp.exp(ahead) - ahead - 1
            losses.append(config.loss.kl_beta * kl - ratio * wide(b.advantages[n]))
            if i >= 2:
                d = jnp.abs(following[0, i - 2] - f0[i - 1])
                l1 = jnp.mean(jnp.where(d < 1, d**2 / 2, d - 0.5))
                target = jax.nn.softmax(f0[i - 1] @ frozen.T)
                ce = -jnp.sum(target * jax.nn.log_softmax(frozen @ hidden[0, i - 2]))
                drafter_losses.append(2 * l1 + 0.1 * ce)
        if losses:
            lengths.append(len(losses))
            rows.append(sum(losses) / len(losses))
            drafter_rows.append(sum(drafter_losses) / len(drafter_losses))
    if config.loss.name == "dapo":
        loss = sum(r * c for r, c in zip(rows, lengths)) / sum(lengths)
    else:
        loss = sum(rows) / len(rows)
    return loss, sum(drafter_rows) / len(drafter_rows)


@pytest.mark.parametrize("name, beta", [("grpo", 0.0), ("dapo", 0.5)])
def test_losses_and_gradients_are_the_longhand_ones_for_any_micro_batches(name, beta):
    """C1, C3, E1, E10: 1, 2 and 4 micro-batches, row by row without padding, in float64.

    The policy's gradient is that of its own loss alone, the drafter's that of its own.
    """
    config = in_float64(CONFIG, loss=grpo.LossConfig(name=name, kl_beta=beta))
    state = new_state(config)
    if beta:
        state = state._replace(reference=jax.tree.map(lambda x: x * 0.9, state.params))
    b = batch()

    @jax.jit
    def reference(params, drafter):
        def total(params, drafter):
            losses = longhand(config, params, drafter, state.reference, b)
            return sum(losses), losses

        return jax.grad(total, (0, 1), has_aux=True)(params, drafter)

    (expected, expected_drafter), losses = reference(state.params, state.drafter)
    for parts in (1, 2, 4):
        split = dataclasses.replace(config, micro_batches=parts)
        grads, drafter_grads, terms, _ = gradients(split, state, b)
        # Weights of tokens are float32, so 1 / 6 holds to 3e-8 only.
        np.testing.assert_allclose([terms.loss, terms.drafter_loss], losses, rtol=2e-7)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
        jax.tree.map(close, grads, expected)
        jax.tree.map(close, drafter_grads, expected_drafter)
