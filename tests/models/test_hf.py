"""Reading config.json and safetensors: every tensor is accounted for, what does not fit is named."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from fastgrpo_jax import base
from fastgrpo_jax.models import hf, hf_config, tiny

RAW = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def config(**changes) -> base.PolicyConfig:
    return hf_config.policy_config(RAW | changes, "float32")


def state(config: base.PolicyConfig) -> dict[str, np.ndarray]:
    """Number the elements of all tensors, so that no two are alike."""
    found, count = {}, 0
    for name, slot in hf.layout(config).items():
        size = int(np.prod(slot.shape))
        found[name] = np.arange(count, count + size, dtype=np.float32).reshape(slot.shape)
        count += size
    return found


def save(tensors: dict[str, np.ndarray], directory):
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


def test_kernels_are_transposed_and_the_rest_is_not(tmp_path):
    tensors = state(config())
    params = hf.read_params(save(tensors, tmp_path), config())
    layer = params["layer_1"]
    names = {
        "self_attn.q_proj": layer["attn"]["q"],
        "self_attn.k_proj": layer["attn"]["k"],
        "self_attn.v_proj": layer["attn"]["v"],
        "self_attn.o_proj": layer["attn"]["o"],
        "mlp.gate_proj": layer["mlp"]["gate"],
        "mlp.up_proj": layer["mlp"]["up"],
        "mlp.down_proj": layer["mlp"]["down"],
    }
    for name, leaf in names.items():
        expected = tensors[f"model.layers.1.{name}.weight"].T
        np.testing.assert_array_equal(leaf["kernel"], expected)
        assert leaf["kernel"].flags.c_contiguous
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["norm"]["scale"], tensors["model.norm.weight"])
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
    for name, path in norms.items():
        expected = tensors[f"model.layers.1.{name}.weight"]
        np.testing.assert_array_equal(layer[path]["scale"], expected)


def test_any_prefix_or_none_may_stand_before_the_body(tmp_path):
    """F17."""
    untied = config(tie_word_embeddings=False)
    tensors = state(untied)
    expected = hf.read_params(save(tensors, tmp_path), untied)
    for body, head in (
        ("", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
    ):
        renamed = {body + k.removeprefix("model."): v for k, v in tensors.items()}
        renamed[head] = renamed.pop(body + "lm_head.weight")
        found = hf.read_params(save(renamed, tmp_path), untied)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_missing_unknown_and_misshaped_tensors_are_listed_together(tmp_path):
    """F17."""
    tensors = state(config())
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((8, 12), np.float32)
    tensors["model.layers.2.input_layernorm.weight"] = np.zeros(8, np.float32)
    with pytest.raises(base.UserError) as e:
        hf.read_params(save(tensors, tmp_path), config())
    message = str(e.value)
    assert "missing: model.norm.weight;" in message
    assert "unknown: model.layers.2.input_layernorm.weight;" in message
    assert (
        "misshaped: model.layers.0.mlp.up_proj.weight (found [8, 12], expected [12, 8])" in message
    )


def test_nothing_is_read_before_the_headers_fit():
    slots = hf.layout(config())
    fetched = []
    with pytest.raises(base.UserError, match="missing"):
        hf.fill(slots, {}, fetched.append, "test")
    assert not fetched


def test_a_tied_checkpoint_may_repeat_its_embedding_but_not_differ(tmp_path):
    """F18."""
    tensors = state(config())
    plain = hf.read_params(save(tensors, tmp_path), config())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    repeated = hf.read_params(save(tensors, tmp_path), config())
    assert "head" not in repeated
    jax.tree.map(np.testing.assert_array_equal, repeated, plain)
    tensors["lm_head.weight"][3, 3] += 1
    with pytest.raises(base.UserError, match=r"lm_head\.weight differs"):
        hf.read_params(save(tensors, tmp_path), config())
    untied = config(tie_word_embeddings=False)
    np.testing.assert_array_equal(
        hf.read_params(tmp_path, untied)["head"], tensors["lm_head.weight"]
    )


def test_an_untied_checkpoint_without_a_head_is_refused(tmp_path):
    """F18."""
    with pytest.raises(base.UserError, match=r"missing: lm_head\.weight"):
        hf.read_params(save(state(config()), tmp_path), config(tie_word_embeddings=False))


def test_stored_rotary_frequencies_are_skipped_and_other_dtypes_refused(tmp_path):
    tensors = state(config())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(1, np.float32)
    hf.read_params(save(tensors, tmp_path), config())
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    with pytest.raises(base.UserError, match="I8"):
        hf.read_params(save(tensors, tmp_path), config())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_every_float_type_becomes_float32(dtype, tmp_path):
    tensors = {k: (v / 64).astype(dtype) for k, v in state(config()).items()}
    params = hf.read_params(save(tensors, tmp_path), config())
    for leaf in jax.tree.leaves(params):
        assert leaf.dtype == np.float32
    found = hf.to_hf_state(params, config())
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value.astype(np.float32))


def test_a_tensor_in_two_shards_or_a_shard_that_is_absent_is_refused(tmp_path):
    """F17."""
    tensors = state(config())
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    safetensors.numpy.save_file(tensors, tmp_path / "one.safetensors")
    with pytest.raises(base.UserError, match=r"two\.safetensors"):
        hf.read_params(tmp_path, config())
    two = {"model.norm.weight": tensors["model.norm.weight"]}
    safetensors.numpy.save_file(two, tmp_path / "two.safetensors")
    with pytest.raises(base.UserError, match=r"model\.norm\.weight twice"):
        hf.read_params(tmp_path, config())


def test_absent_and_broken_weight_files_are_refused(tmp_path):
    with pytest.raises(base.UserError, match="neither"):
        hf.read_params(tmp_path, config())
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(base.UserError, match="no weight_map"):
        hf.read_params(tmp_path, config())
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(base.UserError, match="cannot read"):
        hf.read_params(tmp_path, config())


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama", "attention_bias": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 6, "tie_word_embeddings": False},
    ],
)
def test_reading_what_was_written_changes_nothing(changes, tmp_path):
    c = config(**changes)
    params = tiny.params(c, 3)
    found = hf.read_params(save(hf.to_hf_state(params, c), tmp_path), c)
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_the_families_imply_their_biases_norms_and_head_size():
    """F21."""
    llama = config(head_dim=None)
    assert (llama.qkv_bias, llama.o_bias, llama.qk_norm, llama.head_dim) == (False, False, False, 2)
    biased = config(attention_bias=True)
    assert (biased.qkv_bias, biased.o_bias) == (True, True)
    qwen2 = config(model_type="qwen2", attention_bias=True)  # transformers ignores it too
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = config(model_type="qwen3")
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (
        False,
        False,
        True,
        128,
    )
    biased = config(model_type="qwen3", attention_bias=True, head_dim=4)
    assert (biased.qkv_bias, biased.o_bias, biased.head_dim) == (True, True, 4)


def test_absent_keys_mean_what_transformers_takes_them_for():
    raw = {k: v for k, v in RAW.items() if k not in ("num_key_value_heads", "tie_word_embeddings")}
    c = hf_config.policy_config(raw, "bfloat16")
    assert (c.kv_heads, c.tied, c.rope_theta, c.norm_eps) == (4, False, 10000.0, 1e-6)
    assert (c.rope_scaling, c.dtype) == (None, "bfloat16")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_rope_is_read_in_either_spelling():
    scaling = base.RopeScaling(8.0, 1.0, 4.0, 32)
    for changes, expected in (
        ({"rope_theta": 5e5, "rope_scaling": None}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, (5e5, scaling)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, (5e5, None)),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, (5e5, scaling)),
        ({"rope_parameters": LLAMA3, "rope_theta": 5e5}, (5e5, scaling)),
    ):
        c = config(**changes)
        assert (c.rope_theta, c.rope_scaling) == expected


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "mistral"}, "mistral"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "yarn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "contradict"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1e4}}, "contradict"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 10}, "hidden_size"),
        ({"hidden_size": 10, "head_dim": None}, "hidden_size"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 3}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_what_the_decoder_would_get_wrong_is_refused_by_name(changes, named):
    with pytest.raises(base.UserError, match=named):
        config(**changes)


def test_a_window_that_no_layer_uses_is_harmless():
    config(use_sliding_window=False, sliding_window=8)
    config(use_sliding_window=True, sliding_window=8, max_window_layers=2)
    config(layer_types=["full_attention"] * 2, sliding_window=None)
