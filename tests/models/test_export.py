"""What is exported is read back as it was, by this package and by transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import export, hf_config, load, policy, tiny

SCALING = base.RopeScaling(8.0, 1.0, 4.0, 150)
SHAPES = {
    "llama": dict(rope_theta=2e4, rope_scaling=SCALING, tied=False),
    "llama with biases": dict(qkv_bias=True, o_bias=True, norm_eps=1e-5),
    "qwen2": dict(qkv_bias=True, rope_theta=1e6),
    "qwen3": dict(qk_norm=True, tied=False, head_dim=32),
}


def shape(name: str) -> base.PolicyConfig:
    return dataclasses.replace(tiny.config("float32"), **SHAPES[name])


def save(directory, config: base.PolicyConfig, dtype=np.float32):
    tokenizer = tiny.tokenizer()
    params = jax.tree.map(lambda x: x.astype(dtype), tiny.params(config, 3))
    export.save(directory, config, params, tokenizer, load.stop_tokens(tokenizer, [7]))
    return params


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_saved_is_loaded_bit_for_bit(name, tmp_path):
    config = shape(name)
    params = save(tmp_path / "new" / "folder", config)
    model = load.load(str(tmp_path / "new" / "folder"))
    assert dataclasses.replace(model.config, attention="xla") == config
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    assert model.stop_tokens == (2, 7)
    text = "What is 1 + 2?\n"
    assert model.tokenizer(text)["input_ids"] == tiny.tokenizer()(text)["input_ids"]
    assert model.tokenizer.chat_template == tiny.CHAT_TEMPLATE


def test_weights_keep_their_dtype(tmp_path):
    config = shape("llama")
    params = save(tmp_path, config, ml_dtypes.bfloat16)
    assert hf_config.read_json(tmp_path / "config.json")["dtype"] == "bfloat16"
    found = load.load(str(tmp_path)).params
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float32)), found, params)


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_reads_the_same_model(name, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    config = shape(name)
    params = save(tmp_path, config)
    tokens = np.random.default_rng(0).integers(0, config.vocab, (2, 9))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert model.generation_config.eos_token_id == [2, 7]
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    positions = np.broadcast_to(np.arange(9), tokens.shape)
    mask = np.broadcast_to(np.tril(np.ones((9, 9), bool)), (2, 9, 9))
    params, *given = jax.tree.map(jnp.asarray, (params, tokens, positions, mask))
    read = policy.Policy(config).apply({"params": params}, *given)
    found = policy.logits(read.features, policy.head_table(params))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
