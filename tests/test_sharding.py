"""The sharding tables, and the runner of `sharded.py` on eight devices."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base, sharding, spmd
from fastgrpo_jax.models import eagle, lora, policy
from fastgrpo_jax.train import distill, grpo, layout, optim, step
from tests.rollout import toys

HERE = pathlib.Path(__file__).parent
DEVICES = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


def test_eight_devices_do_what_one_does():
    """Tokens, losses, updates, checkpoints, whole runs: in a process that has eight devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"
    command = [sys.executable, "-m", "pytest", "-n", "0", str(HERE / "sharded.py")]
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    for name in [name for name in env if name.startswith("PYTEST_")]:
        del env[name]
    done = subprocess.run(command, env=env, cwd=HERE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


FULL = dataclasses.replace(toys.CONFIG, qkv_bias=True, o_bias=True, qk_norm=True)
HEADS = [
    eagle.config_for(FULL, "fastgrpo"),
    dataclasses.replace(eagle.config_for(FULL, "eagle"), taps=(0, 1, 1), fc_bias=True),
]


def paths(tree) -> dict[str, int]:
    """List the dimensions of every leaf by its path, as the tables see it."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = (str(getattr(x, "key", getattr(x, "name", getattr(x, "idx", "")))) for x in path)
        found["/".join(names)] = leaf.ndim
    return found


@pytest.mark.parametrize("adapted", [None, lora.LoraConfig(rank=2)], ids=["whole", "lora"])
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
@pytest.mark.parametrize("optimizer", optim.OPTIMIZERS)
def test_every_leaf_of_a_state_has_exactly_one_place(optimizer, head, adapted):
    """Weights of all families and drafters, moments of all optimisers, counters, reference."""
    config = step.StepConfig(
        policy=FULL,
        eagle=head,
        loss=grpo.LossConfig(kl_beta=0.1),
        optim=optim.OptimConfig(optimizer=optimizer),
        drafter_optim=optim.OptimConfig(optimizer=optimizer),
        distill=distill.DistillConfig(),
        max_response=4,
        lora=adapted,
    )

    def make():
        keys = jax.random.split(jax.random.key(0))
        params = policy.init(keys[0], FULL)
        own = lora.init(keys[0], adapted, params) if adapted else None
        return step.init_state(config, params, eagle.init(keys[1], head), own)

    for path, dimensions in paths(jax.eval_shape(make)).items():
        for table in (sharding.TRAINING, sharding.ROLLOUT):
            spec = sharding.spec_of(path, table)
            assert len(spec) <= dimensions, path
            assert table is sharding.TRAINING or sharding.FSDP not in spec
        cut = sharding.spec_of(path, sharding.TRAINING)
        if path.endswith(("/a", "/b")):
            assert (sharding.FSDP in cut) != (sharding.TENSOR in cut), path
        elif dimensions == 2:
            assert sharding.FSDP in cut, path
            assert (sharding.TENSOR in cut) != path.endswith(("fc/kernel", "merge/kernel")), path


def _adapters():
    params = policy.init(jax.random.key(0), FULL)
    return lora.init(jax.random.key(0), lora.LoraConfig(rank=2), params)


def test_no_row_of_the_table_is_idle():
    """Every row fits something, so that a typing error in one shows."""
    seen = {}
    for head in HEADS:
        trees = {
            "a": jax.eval_shape(lambda: policy.init(jax.random.key(0), FULL)),
            "b": jax.eval_shape(lambda head=head: eagle.init(jax.random.key(0), head)),
            "c": jax.eval_shape(_adapters),
            "step": jnp.int32(0),
        }
        seen |= paths(trees)
    used = {id(sharding.spec_of(path, sharding.TRAINING)) for path in seen}
    assert {id(spec) for _, spec in sharding.TRAINING} == used


@pytest.mark.parametrize(
    "path", ["layer_0/attn/w/kernel", "mlp/kernel", "layer_0/lora/kernel", "x"]
)
def test_a_parameter_that_no_row_fits_is_an_error(path):
    with pytest.raises(
        ValueError, match=f"0 rows of the sharding table fit the parameter '{path}'"
    ):
        sharding.spec_of(path, sharding.TRAINING)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 1, -1), "3 x 1 x -1; allowed: a product of 8"),
        ((2, 2, 1), "2 x 2 x 1; allowed: a product of 8"),
        ((16, -1, 1), "16 x -1 x 1"),
        ((-1, -1, 1), "-1 for one axis only"),
        ((0, 1, 8), "mesh.data is 0; allowed: 1 or more, or -1"),
        ((1, 1, -2), "mesh.tensor is -2"),
    ],
)
def test_a_mesh_that_the_devices_cannot_make_is_refused(sizes, message, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with pytest.raises(base.UserError) as error:
        sharding.mesh_for(*sizes)
    assert message in str(error.value)


def test_one_device_has_no_mesh_and_nothing_is_asked_of_the_compiler():
    assert sharding.mesh_for(1, -1, 1) is None
    assert sharding.mesh_for(1, 1, 1) is None
    assert sharding.shards(None) == 1 and not sharding.gathers(None)
    assert sharding.describe(None) == "one device"
    x = {"a": jnp.ones((3, 2))}
    for ask in (spmd.whole, spmd.rows, spmd.seats, spmd.gathered, spmd.trained):
        assert ask(None, x) is x
    sharding.check(None, FULL, None)


def sizes(**shape):
    """Make a mesh of a shape alone."""
    return jax.sharding.AbstractMesh((1, *shape.values()), sharding.AXES)


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        (dict(fsdp=3, tensor=1), {}, "mesh.fsdp is 3, but the model has 16 hidden dimensions"),
        (dict(fsdp=1, tensor=4), {}, "mesh.tensor is 4, but the model has 2 heads"),
        (dict(fsdp=1, tensor=2), {}, "mesh.tensor is 2, but the model has 37 ids of the vocab"),
        (dict(fsdp=1, tensor=2), dict(vocab=38, ffn=33), "33 units of the feed-forward"),
        (dict(fsdp=1, tensor=16), dict(vocab=48, heads=16), "8 numbers of a key"),
    ],
)
def test_a_model_that_the_mesh_cannot_cut_is_refused(shape, change, message):
    config = dataclasses.replace(toys.CONFIG, **change)
    with pytest.raises(base.UserError) as error:
        sharding.check(sizes(**shape), config, None)
    assert message in str(error.value)
    assert "allowed: divisors of" in str(error.value)


def test_a_drafter_that_the_mesh_cannot_cut_is_refused_but_its_vocabulary_is_the_models():
    config = dataclasses.replace(toys.CONFIG, vocab=38)
    mesh = sizes(fsdp=2, tensor=2)
    sharding.check(mesh, config, eagle.config_for(config, "eagle"))
    with pytest.raises(base.UserError, match="but the drafter has 3 heads"):
        head = dataclasses.replace(eagle.config_for(config, "eagle"), heads=3)
        sharding.check(mesh, config, head)


def test_filled_up_rows_have_a_prompt_and_no_response():
    """The weights of real tokens stay the same; the new ones weigh nothing."""
    rng = np.random.default_rng(0)
    batch = layout.StepBatch(
        tokens=jnp.asarray(rng.integers(1, 9, (3, 7)), jnp.int32),
        prompt_length=jnp.array([2, 3, 1], jnp.int32),
        length=jnp.array([5, 3, 7], jnp.int32),
        logps=jnp.asarray(rng.normal(size=(3, 7)), jnp.float32),
        advantages=jnp.ones(3, jnp.float32),
        temperature=jnp.ones(3, jnp.float32),
        kept=jnp.array([True, True, True]),
    )
    filled = layout.fill(batch, 2)
    assert layout.fill(batch, 0) is batch
    assert filled.staleness is None
    np.testing.assert_array_equal(filled.length[3:], filled.prompt_length[3:])
    assert np.all(filled.prompt_length[3:] == 1)
    for name in ("grpo", "dapo", "dr_grpo"):
        before, after = (layout.locate(b, 6, name) for b in (batch, filled))
        for field in before._fields:
            np.testing.assert_array_equal(getattr(after, field)[:3], getattr(before, field))
        assert not np.any(after.weights[3:]) and not np.any(after.drafter_weights[3:])
        assert not np.any(after.mask[3:])
