"""LoRA: adapters beside the kernels are the merged kernels, and nothing else is trained."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import lora, policy
from fastgrpo_jax.train import checkpoint, grpo, loop, metrics, step
from fastgrpo_jax.train import setup as setup_lib
from tests.train import test_loop, test_step

SOME = lora.LoraConfig(rank=3, alpha=6.0, targets=("q", "v", "down"))
ALL = lora.LoraConfig(rank=2, alpha=1.0)


def adapters(config, params, zero=False):
    made = lora.init(jax.random.key(3), config, params)
    if zero:
        return made
    rng = np.random.default_rng(4)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), made)


def state_of(config, zero=False):
    params, drafter = test_step.raw_params()
    return step.init_state(config, params, drafter, adapters(config.lora, params, zero))


def adapted(beta=0.0, which=SOME, **changes):
    return test_step.in_float64(
        test_step.CONFIG, lora=which, loss=grpo.LossConfig(kl_beta=beta), **changes
    )


def test_adapters_belong_to_the_targets_and_start_as_nothing():
    params = jax.tree.map(jnp.asarray, test_step.raw_params()[0])
    made = adapters(SOME, params, zero=True)
    assert set(made) == {"layer_0"} and set(made["layer_0"]) == {"attn", "mlp"}
    assert set(made["layer_0"]["attn"]) == {"q", "v"} and set(made["layer_0"]["mlp"]) == {"down"}
    a, b = made["layer_0"]["mlp"]["down"]["a"], made["layer_0"]["mlp"]["down"]["b"]
    assert a.shape == (24, 3) and b.shape == (3, 16) and not b.any()
    assert 0.5 * 24**-0.5 < np.abs(a).max() <= 24**-0.5
    jax.tree.map(np.testing.assert_array_equal, lora.merge(SOME, params, made), params)
    assert len(jax.tree.leaves(adapters(ALL, params))) == 2 * 7


@pytest.mark.parametrize("remat", ("none", "full"))
@pytest.mark.parametrize("which", (SOME, ALL), ids=("some", "all"))
def test_beside_the_kernels_they_act_as_merged_into_them(which, remat):
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), test_step.raw_params()[0])
    own = adapters(which, params)
    config = dataclasses.replace(test_step.POLICY, dtype="float64")
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    place = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 6))
    mask = place[:, :, None] >= place[:, None]

    def read(variables):
        return policy.Policy(config, remat).apply(variables, tokens, place, mask).features

    beside = read({"params": params, "lora": lora.scaled(which, own)})
    merged = read({"params": lora.merge(which, params, own)})
    np.testing.assert_allclose(beside, merged, rtol=1e-9)
    assert np.abs(beside - read({"params": params})).max() > 0.1


@pytest.mark.parametrize("beta", (0.0, 0.5))
def test_gradients_are_those_of_the_merged_policy(beta):
    """By the chain rule from the full gradient; the reference is the policy without adapters."""
    config = adapted(beta)
    state, b = state_of(config), test_step.batch()
    whole = dataclasses.replace(config, lora=None)
    merged = step.init_state(
        whole, lora.merge(SOME, state.params, state.adapters), test_step.raw_params()[1]
    )
    if beta:
        merged = merged._replace(reference=state.params)
    full, drafter, terms, _ = test_step.gradients(whole, merged, b)

    def chain(own):
        return lora.merge(SOME, state.params, own)

    (wanted,) = jax.vjp(chain, state.adapters)[1](full)
    found, found_drafter, found_terms, _ = test_step.gradients(config, state, b)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9)
    jax.tree.map(close, found, wanted)
    jax.tree.map(close, found_drafter, drafter)
    np.testing.assert_allclose(found_terms.loss, terms.loss, rtol=1e-9)
    assert (found_terms.policy.kl is not None) == bool(beta)


def test_a_step_moves_adapters_and_drafter_and_no_weight_of_the_policy():
    config = dataclasses.replace(test_step.CONFIG, lora=SOME, loss=grpo.LossConfig(kl_beta=0.1))
    before = jax.device_get(state_of(config, zero=True))
    after, seen = step.make_train_step(config)(state_of(config, zero=True), test_step.batch())
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    assert after.reference is None and seen["kl"] == 0 and seen["grad_norm"] > 0
    moved = after.adapters["layer_0"]["attn"]["q"]
    assert np.abs(moved["b"]).max() > 1e-3
    assert not np.array_equal(jax.tree.leaves(after.drafter)[0], jax.tree.leaves(before.drafter)[0])
    assert base.tree_bytes(after.opt_state) < base.tree_bytes(before.params)


def test_frozen_weights_keep_the_compute_dtype_and_adapters_are_float32():
    config = dataclasses.replace(
        test_step.CONFIG,
        lora=SOME,
        policy=dataclasses.replace(test_step.POLICY, dtype="bfloat16"),
    )
    state = state_of(config)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state.adapters)} == {jnp.dtype(jnp.float32)}
    merged = step.merged(SOME, state)
    assert {x.dtype for x in jax.tree.leaves(merged)} == {jnp.dtype(jnp.bfloat16)}


def test_a_run_saves_adapters_alone_and_resumes_bit_for_bit(tmp_path):
    """And its rollouts are those of the merged policy: the recorded log-probs are the trainer's."""
    changes = dict(lora__rank=4, optim__learning_rate=0.05, loss__kl_beta=0.01)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    loop.train(test_loop.config(**changes), whole)
    loop.train(test_loop.config(steps=2, **changes), halves)
    loop.train(test_loop.config(**changes), halves)
    assert test_loop.timeless(whole) == test_loop.timeless(halves)
    rows = metrics.read(whole)
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    assert rows[-1]["kl"] > 0 and all(row["compile/unexpected"] == 0 for row in rows)
    c = test_loop.config(**changes)
    setup = setup_lib.prepare(c)
    manager = checkpoint.open_manager(whole, c.checkpoint.keep)
    first = setup_lib.first_state(c, setup)
    state, _ = checkpoint.restore(manager, first)
    manager.close()
    jax.tree.map(np.testing.assert_array_equal, state.params, first.params)
    saved = sum(x.stat().st_size for x in (whole / "checkpoints").rglob("*") if x.is_file())
    assert saved < 3 * base.tree_bytes((state.adapters, state.drafter)) * 3  # two steps, moments


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(lora__rank=-1), r"lora\.rank is -1; allowed: 0 \(off\) to 4096"),
        (dict(lora__rank=4, lora__alpha=0), r"lora\.alpha is 0"),
        (dict(lora__rank=4, lora__targets="q,head"), r"lora\.targets is 'q,head'; allowed: some"),
        (dict(lora__rank=4, lora__targets="q,q"), r"lora\.targets is 'q,q'"),
        (
            dict(lora__rank=4, loss__kl_beta=0.1, loss__reference_sync_every=2),
            r"loss\.reference_sync_every is 2; allowed: 0 with lora",
        ),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(base.UserError, match=message):
        setup_lib.prepare(test_loop.config(**changes))
