"""A prompt that is read once for its group teaches what a prompt read per sequence teaches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.train import distill, grpo, layout, optim, step

V, G, LP, R = 31, 3, 6, 4
POLICY = base.PolicyConfig(
    vocab=V, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, max_positions=64,
    dtype="float64",
)  # fmt: skip


def config(kind="fastgrpo", **changes):
    return step.StepConfig(
        policy=POLICY,
        eagle=eagle.config_for(POLICY, kind),
        loss=grpo.LossConfig(kl_beta=0.3),
        optim=optim.OptimConfig(),
        drafter_optim=optim.OptimConfig(),
        distill=distill.DistillConfig(),
        max_response=R,
        max_prompt=LP,
        **changes,
    )


def batch(prompt_lengths=(6, 3)):
    """Groups of three with unequal responses: full, short, and none at all."""
    rng = np.random.default_rng(1)
    prompts = np.repeat(prompt_lengths, G).astype(np.int32)
    tokens = rng.integers(0, V, (len(prompts), LP + R)).astype(np.int32)
    for i, length in enumerate(prompts):
        tokens[i, :length] = tokens[i // G * G, :length]
    return layout.StepBatch(
        tokens=jnp.asarray(tokens),
        prompt_length=jnp.asarray(prompts),
        length=jnp.asarray(prompts + np.array([4, 1, 0, 3, 4, 2], np.int32)),
        logps=jnp.zeros(tokens.shape, jnp.float32),
        advantages=jnp.asarray(rng.normal(size=len(prompts)), jnp.float32),
        temperature=jnp.full(len(prompts), 0.7, jnp.float32),
    )


def state(c):
    params = jax.tree.map(
        lambda x: x * 10 if x.ndim > 1 else x, policy.init(jax.random.key(0), POLICY)
    )
    drafter = eagle.init(jax.random.key(1), c.eagle)
    made = step.init_state(c, params, drafter)
    return made._replace(reference=jax.tree.map(lambda x: x * 0.9, made.params))


gradients = jax.jit(step.gradients, static_argnums=0)


@pytest.mark.parametrize("kind", eagle.KINDS)
def test_losses_and_gradients_are_the_same_with_prompts_shared_and_apart(kind):
    apart, shared = config(kind), config(kind, group=G)
    assert layout.responses_per_row(POLICY, G, LP, R) == G  # so that sharing is what is tested
    b = batch()
    expected, found = (gradients(c, state(c), b) for c in (apart, shared))
    assert float(expected[2].loss) != 0 and float(expected[2].drafter_loss) != 0
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), expected, found
    )


def test_a_prompt_of_one_token_shares_too():
    b = batch((6, 1))
    expected, found = (gradients(c, state(c), b) for c in (config(), config(group=G)))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), expected, found
    )


def test_micro_batches_of_whole_groups_and_of_cut_ones_give_the_same_gradient():
    """C1 for both layouts: 2 parts hold a group each, 3 parts cut them."""
    b = batch()
    c = config(group=G)
    expected = gradients(c, state(c), b)[:2]
    for parts in (2, 3):
        found = gradients(dataclasses.replace(c, micro_batches=parts), state(c), b)[:2]
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), expected, found
        )


def rows_by_hand():
    """One prompt of 2 real places in 3, two responses of 2, of which the second has one token."""
    b = layout.StepBatch(
        tokens=jnp.array([[1, 2, 3, 4, 9], [1, 2, 5, 9, 9]], jnp.int32),
        prompt_length=jnp.array([2, 2], jnp.int32),
        length=jnp.array([4, 3], jnp.int32),
        logps=jnp.zeros((2, 5), jnp.float32),
        advantages=jnp.zeros(2, jnp.float32),
        temperature=jnp.ones(2, jnp.float32),
    )
    return layout.padded(b, layout.locate(b, 2, "grpo"), 3, 2)


def test_rows_are_laid_out_as_drawn_by_hand():
    rows = rows_by_hand()
    assert rows.tokens.tolist() == [[1, 2, 3, 3, 4, 5, 9]]
    assert rows.positions.tolist() == [[0, 1, 2, 2, 3, 2, 3]]
    assert rows.sequence.tolist() == [[0, 0, 1, -1]]
    assert rows.before.tolist() == [[1, 3, 1, 5]]
    assert rows.targets.tolist() == [[3, 4, 5, 9]]
    assert rows.mask[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],  # the prompt's padding, which nothing sees
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1, 1],
    ]


def test_long_responses_get_rows_of_their_own():
    """Attention of a shared row is over all responses at once, which long ones make dear."""
    shape = dataclasses.replace(
        POLICY, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536
    )  # SmolLM2-135M
    assert layout.responses_per_row(shape, 8, 40, 24) == 8
    assert layout.responses_per_row(shape, 8, 40, 4096) == 1


def test_a_places_predecessor_is_the_one_before_it_in_its_sequence():
    rows = rows_by_hand()
    assert rows.previous.tolist() == [[-1, 0, 1, 1, 3, 1, 5]]
