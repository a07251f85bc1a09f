"""Qwen2.5-7B's train step and its largest decode block, compiled for machines that are not here.

Minutes of compiling, so only on request: `make aot`, which installs the compilers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from fastgrpo_jax import base, sharding
from fastgrpo_jax.models import eagle, hf_config, policy
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.rollout import pool, speculate, strategy
from fastgrpo_jax.train import distill, grpo, layout, optim, step
from tests.models.test_attention import H100, TPU_ENVIRONMENT

pytestmark = pytest.mark.aot

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}
PROMPT, RESPONSE, GROUP = 256, 1024, 8
GIB = 2**30


def tpu(monkeypatch):
    pytest.importorskip("libtpu")
    for name, value in TPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4")


def gpu(monkeypatch):
    pytest.importorskip("jax_plugins.xla_cuda13")
    return topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x8")


# Kind, mesh, rows of a step and of the largest bucket, and what a device has.
MACHINES = [
    pytest.param(tpu, "tpu", (1, 4, 4), 64, 15.75 * GIB, id="v5e:4x4"),
    pytest.param(gpu, "gpu", (1, 2, 4), 64, 79.1 * GIB, id="h100:8"),
]


def config_of(kind: str, devices, sizes) -> base.PolicyConfig:
    kinds = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.sharding.Mesh(np.array(devices).reshape(sizes), sharding.AXES, axis_types=kinds)
    return dataclasses.replace(hf_config.policy_config(QWEN, "bfloat16"), mesh=mesh, attention=kind)


def check_bytes(name: str, kind: str, compiled, most: float) -> None:
    """Compare what a device needs with what it has. For a TPU the compiler's own refusal decides
    (RESOURCE_EXHAUSTED): it spends memory that is spare, so its figure is an upper one."""
    m = compiled.memory_analysis()
    needed = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    needed += m.temp_size_in_bytes
    print(f"{name}: {needed / GIB:.2f} of {most / GIB:.2f} GiB a device")
    assert m.alias_size_in_bytes > 0.9 * m.output_size_in_bytes  # donated, else state counts twice
    assert m.argument_size_in_bytes < 0.5 * most
    assert kind == "tpu" or needed <= most


@pytest.mark.parametrize(("machine", "kind", "sizes", "rows", "most"), MACHINES)
def test_the_train_step_compiles_and_fits(machine, kind, sizes, rows, most, monkeypatch):
    """Masters, moments, gradients in float32; both losses; 64 sequences of up to 1,280 tokens."""
    devices = machine(monkeypatch).devices
    with jax.enable_x64(False):
        model = config_of(kind, devices, sizes)
        config = step.StepConfig(
            policy=model,
            eagle=eagle.config_for(model, "fastgrpo"),
            loss=grpo.LossConfig(),
            optim=optim.OptimConfig(),
            drafter_optim=optim.OptimConfig(),
            distill=distill.DistillConfig(),
            max_response=RESPONSE,
            max_prompt=PROMPT,
            group=GROUP,
            micro_batches=16,
            remat="full",
        )
        alone = dataclasses.replace(config, policy=dataclasses.replace(model, mesh=None))

        def make():
            params = policy.init(jax.random.key(0), alone.policy)
            return step.init_state(alone, params, eagle.init(jax.random.key(1), config.eagle))

        state = jax.eval_shape(make)
        state = sharding.shapes(model.mesh, state, sharding.of_params(model.mesh, state))

        def of(shape, dtype):
            where = sharding.on(model.mesh, sharding.ROWS)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

        number, each = (rows,), (rows, PROMPT + RESPONSE)
        whole = sharding.everywhere(model.mesh)
        batch = layout.StepBatch(
            tokens=of(each, jnp.int32),
            prompt_length=of(number, jnp.int32),
            length=of(number, jnp.int32),
            logps=of(each, jnp.float32),
            advantages=of(number, jnp.float32),
            temperature=of(number, jnp.float32),
            draft_ids=jax.ShapeDtypeStruct((8192,), jnp.int32, sharding=whole),
        )
        compiled = step.make_train_step(config).lower(state, batch).compile()
    check_bytes("train step", kind, compiled, most)


@pytest.mark.parametrize(("machine", "kind", "sizes", "rows", "most"), MACHINES)
def test_the_largest_decode_block_compiles_and_fits(machine, kind, sizes, rows, most, monkeypatch):
    """64 rows with slots for the longest sequence, each verifying a tree of 16 nodes."""
    devices = machine(monkeypatch).devices
    choice = strategy.parse("learned:4:4:16")
    with jax.enable_x64(False):
        model = config_of(kind, devices, sizes)
        head = eagle.config_for(model, "fastgrpo")
        spec = speculate.Spec(model, head, GROUP)
        engine = engine_lib.make_engine(
            spec,
            rows=(rows,),
            limits=engine_lib.Limits(PROMPT, RESPONSE, PROMPT + RESPONSE),
            stop_tokens=(151643, 151645),
            slot_step=PROMPT + RESPONSE + choice.span,
            span=choice.span,
        )

        def make():
            alone = dataclasses.replace(model, mesh=None)
            params = policy.init(jax.random.key(0), alone), eagle.init(jax.random.key(1), head)
            return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

        params = jax.eval_shape(make)
        where = sharding.of_params(model.mesh, params, sharding.ROLLOUT)
        whole = sharding.everywhere(model.mesh)
        tau = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        ids = jax.ShapeDtypeStruct((8192,), jnp.int32, sharding=whole)
        table = jax.ShapeDtypeStruct((8192, model.hidden), jnp.bfloat16, sharding=whole)
        params = sharding.shapes(model.mesh, params, where)
        weights = speculate.Weights(*params, None, tau, ids, table)
        controller = strategy.constant("fixed", choice)
        engine_lib.warm_up(engine, weights, controller, 1)
    ((key, _), compiled), *others = engine.pool.programs.items()
    assert key[0] == "block" and key[1].rows == rows and not others
    assert isinstance(engine.pool, pool.Pool)
    check_bytes("decode block", kind, compiled, most)
