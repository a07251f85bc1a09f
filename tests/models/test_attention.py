"""The fused attention kernel against XLA's, interpreted here and compiled ahead of time for others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from fastgrpo_jax import base
from fastgrpo_jax.models import attention, policy


def inputs(rows=2, tokens=5, heads=6, kv=2, slots=256, dim=64, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(rows, tokens, heads, dim)) * 2
    k, v = rng.normal(size=(2, rows, kv, slots, dim))
    # A tree: all of the past, which differs by row, and some nodes among the last.
    length = np.array([130, 249])[:rows]
    place = np.arange(slots)
    inside = rng.random((rows, tokens, slots)) < 0.5
    later = (place >= length[:, None]) & (place < length[:, None] + tokens)
    mask = (place < length[:, None])[:, None] | (later[:, None] & inside)
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(mask)


def longhand(q, k, v, mask):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    rows, tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    out = np.zeros((rows, tokens, heads, dim))
    for b in range(rows):
        for h in range(heads):
            scores = q[b, :, h] @ k[b, h // group].T / np.sqrt(dim)
            scores = np.where(np.asarray(mask[b]), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[b, :, h] = weights / weights.sum(-1, keepdims=True) @ v[b, h // group]
    return out.reshape(rows, tokens, -1)


@pytest.mark.parametrize("tokens", [1, 5, 50])  # tiles of 32, 32, and two of 128
@pytest.mark.parametrize("dtype, error", [(jnp.float32, 2e-5), (jnp.bfloat16, 2e-2)])
def test_both_forms_are_attention_written_out(tokens, dtype, error):
    x = inputs(tokens=tokens, dtype=dtype)
    expected = longhand(*x)
    for kernel in ("xla", "interpret"):
        found = attention.attend(*x, kernel)
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=error)
    # Three queries a key head are not worth the kernel.
    assert uses_kernel(functools.partial(attention.attend, kernel="interpret"), *x) == (tokens > 1)


def uses_kernel(function, *x) -> bool:
    return "pallas_call" in str(jax.make_jaxpr(function)(*x))


def test_gradients_are_those_of_the_plain_form():
    q, k, v, mask = inputs()

    def loss(kernel, q, k, v):
        return jnp.sum(jnp.sin(attention.attend(q, k, v, mask, kernel)))

    kernels = ("xla", "interpret")
    plain, fused = (jax.grad(functools.partial(loss, x), (0, 1, 2))(q, k, v) for x in kernels)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), plain, fused)


def test_the_kernel_is_used_where_it_can_be_and_saves_traffic():
    def pays(tokens=5, slots=256, dim=128, dtype=jnp.bfloat16, heads=8, kv=2):
        q = jax.ShapeDtypeStruct((1, kv, tokens * heads // kv, dim), dtype)
        return attention.pays(q, jax.ShapeDtypeStruct((1, kv, slots, dim), dtype))

    assert pays()
    assert not pays(tokens=1, heads=2)  # one query a key head: 16 bytes beside 512
    assert not pays(slots=200)
    assert not pays(dim=80)
    assert not pays(dtype=jnp.float64)
    assert not pays(slots=128 * 1024)


def test_auto_takes_the_kernel_of_the_device_and_a_cpu_has_none():
    assert [attention.kernel_for("auto", x) for x in ("cpu", "tpu", "gpu")] == ["xla", "tpu", "gpu"]
    assert [attention.kernel_for("xla", x) for x in ("cpu", "tpu")] == ["xla", "xla"]
    assert attention.kernel_for("fused", "gpu") == "gpu"
    with pytest.raises(base.UserError, match="the devices here are cpu; allowed: auto, xla"):
        attention.kernel_for("fused", "cpu")
    with pytest.raises(
        base.UserError, match=r"model.attention is 'flash'; allowed: auto, xla, fused"
    ):
        attention.kernel_for("flash", "gpu")


def test_the_policy_hands_the_kernel_down_to_every_layer():
    shape = base.PolicyConfig(
        vocab=11, hidden=16, layers=2, heads=4, kv_heads=2, head_dim=64, ffn=8, max_positions=256,
        attention="interpret",
    )  # fmt: skip
    tokens = jnp.zeros((1, 128), jnp.int32)
    mask = jnp.ones((1, 128, 128), bool)

    def run(c):
        params = policy.init(jax.random.key(0), c)
        return policy.Policy(c).apply({"params": params}, tokens, tokens, mask).features

    assert str(jax.make_jaxpr(lambda: run(shape))()).count("pallas_call") >= 2
    plain = run(dataclasses.replace(shape, attention="xla"))
    np.testing.assert_allclose(run(shape), plain, atol=1e-4)


def shapes(tokens, dtype, sharding=None):
    def of(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    k = of((4, 4, 1024, 128), dtype)
    return of((4, tokens, 28, 128), dtype), k, k, of((4, tokens, 1024), jnp.bool_)


def compiled_for(topology, kernel, tokens, dtype):
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    function = jax.jit(functools.partial(attention.attend, kernel=kernel))
    with jax.enable_x64(False):  # as in use: the tests' 64-bit indices are not the kernels'
        return function.lower(*shapes(tokens, dtype, sharding)).compile().as_text()


TPU_ENVIRONMENT = {  # what libtpu asks where there is none
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@pytest.mark.parametrize("tokens", [5, 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_compiles_for_a_tpu(monkeypatch, tokens, dtype):
    """Qwen2.5-7B's heads; needs libtpu, but no TPU."""
    pytest.importorskip("libtpu")
    for name, value in TPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    assert "tpu_custom_call" in compiled_for(topology, "tpu", tokens, dtype)


H100 = """
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_core: 233472
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 l2_cache_size: 52428800
  memory_bandwidth: 3352320000000 device_memory_size: 84942979072 dnn_version: "9.10.0"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}"""


@pytest.mark.parametrize("tokens", [5, 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_compiles_for_an_h100(tokens, dtype):
    """Needs jax-cuda13-plugin and jax-cuda13-pjrt, but no GPU."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1")
    assert "triton" in compiled_for(topology, "gpu", tokens, dtype)
