"""GGUF files written here with the gguf library are read back to exactly their own values."""

import dataclasses
import sys

import jax
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import gguf, hf, tiny

library = pytest.importorskip("gguf")

CONFIGS = {
    "llama": base.PolicyConfig(266, 64, 2, 4, 2, 16, 96, 512, tied=False),
    "qwen2": base.PolicyConfig(266, 64, 2, 4, 2, 16, 96, 512, rope_theta=1e6, qkv_bias=True),
    "qwen3": base.PolicyConfig(266, 64, 1, 2, 1, 64, 96, 512, norm_eps=1e-5, qk_norm=True),
}


def byte_symbols() -> list[str]:
    """Spell the 256 bytes as GPT-2 does: printable ones as themselves, the rest from U+0100."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(i if i in shown else next(rest)) for i in range(256)]


def permute(x: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows as llama.cpp's converter does for its Llama graph, row by row."""
    dim = x.shape[0] // heads
    order = [
        h * dim + j * (dim // 2) + i for h in range(heads) for i in range(dim // 2) for j in (0, 1)
    ]
    return x[order]


def params_of(config: base.PolicyConfig):
    """Draw weights; biases and norms random too."""
    rng = np.random.default_rng(5)
    return jax.tree.map(
        lambda x: rng.standard_normal(x.shape).astype(np.float32), tiny.params(config, 0)
    )


def write(path, arch, config, params, qtype="F32", extra=(), pre="qwen2", fields=None, lists=None):
    """Write a model; return the params that a reader should find (quantised ones dequantised)."""
    out = library.GGUFWriter(path, arch)
    out.add_block_count(config.layers)
    out.add_context_length(config.max_positions)
    out.add_embedding_length(config.hidden)
    out.add_feed_forward_length(config.ffn)
    out.add_head_count(config.heads)
    out.add_head_count_kv(config.kv_heads)
    out.add_key_length(config.head_dim)
    out.add_rope_freq_base(config.rope_theta)
    out.add_layer_norm_rms_eps(config.norm_eps)
    symbols = byte_symbols()
    words = ["12", "Ġ1", "Ġab", "ab", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>"]
    tokens = symbols + words + ["!Ċ", "[PAD265]"]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_types([1] * 260 + [3, 3, 3, 4, 1, 5])
    out.add_token_merges(["1 2", "Ġ 1", "a b", "! Ċ"])
    out.add_eos_token_id(261)
    out.add_pad_token_id(262)
    for key, value in (fields or {}).items():
        out.add_key_value(key, value, library.GGUFValueType.get_type(value))
    kind = library.GGMLQuantizationType[qtype]
    state = hf.to_hf_state(params, config)
    for name, x in state.items():
        part = name.split(".")[-2]
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads}
        if arch == "llama" and part in heads:
            x = permute(x, heads[part])
        if x.ndim == 1:
            out.add_tensor(stored_name(name), x)
            continue
        packed = library.quants.quantize(x, kind)
        out.add_tensor(stored_name(name), packed, raw_dtype=kind)
        unpacked = library.quants.dequantize(packed, kind)
        if arch == "llama" and part in heads:
            stored, unpacked = unpacked, np.empty_like(unpacked)
            unpacked[permute(np.arange(len(x)), heads[part])] = stored
        state[name] = unpacked
    for name, x in extra:
        out.add_tensor(name, x)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return hf.fill(hf.layout(config), {k: v.shape for k, v in state.items()}, state.get, "test")


def stored_name(name: str) -> str:
    """Translate by the gguf library's own table."""
    table = library.get_tensor_name_map(library.MODEL_ARCH.LLAMA, 4)
    qwen = library.get_tensor_name_map(library.MODEL_ARCH.QWEN3, 4)
    found = table.get_name(name, (".weight", ".bias")) or qwen.get_name(name, (".weight", ".bias"))
    assert found
    return found


@pytest.mark.parametrize("qtype", gguf.TYPES)
@pytest.mark.parametrize("arch", CONFIGS)
def test_every_family_and_quantisation_gives_back_its_dequantised_values(arch, qtype, tmp_path):
    """E9: llama's q and k rows are permuted in the file, those of the Qwen families are not."""
    config = CONFIGS[arch]
    expected = write(tmp_path / "m.gguf", arch, config, params_of(config), qtype)
    found = gguf.read(tmp_path / "m.gguf", "float32")
    assert dataclasses.replace(found.config, norm_eps=config.norm_eps) == config
    assert found.config.norm_eps == pytest.approx(config.norm_eps, rel=1e-6)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(found.params))


def test_undoing_the_permutation_restores_the_rows():
    x = np.arange(24)
    np.testing.assert_array_equal(gguf.unpermute(permute(x, 3), 3), x)
    np.testing.assert_array_equal(permute(np.arange(8), 1), [0, 4, 1, 5, 2, 6, 3, 7])


def test_biases_of_a_llama_are_permuted_too(tmp_path):
    config = dataclasses.replace(CONFIGS["llama"], qkv_bias=True, o_bias=True)
    expected = write(tmp_path / "m.gguf", "llama", config, params_of(config))
    found = gguf.read(tmp_path / "m.gguf", "float32")
    assert found.config.qkv_bias and found.config.o_bias
    jax.tree.map(np.testing.assert_array_equal, found.params, expected)


def divisors(config, factor):
    """Compute Llama 3's divisors as the converter does, frequency by frequency."""
    found = []
    for i in range(config.head_dim // 2):
        wavelength = 2 * np.pi * config.rope_theta ** (2 * i / config.head_dim)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_llama3_scaling_is_recognised_from_its_divisors(tmp_path):
    config = dataclasses.replace(CONFIGS["llama"], rope_theta=500000.0, head_dim=64)
    params, path = params_of(config), tmp_path / "m.gguf"
    x = divisors(config, 32.0)
    assert ((x > 1) & (x < 32)).any()
    write(path, "llama", config, params, extra=[("rope_freqs.weight", x)])
    assert gguf.read(path, "float32").config.rope_scaling == base.RopeScaling(32.0, 1.0, 4.0, 8192)
    write(path, "llama", config, params, extra=[("rope_freqs.weight", np.ones_like(x))])
    assert gguf.read(path, "float32").config.rope_scaling is None
    write(path, "llama", config, params, extra=[("rope_freqs.weight", np.sqrt(x))])
    with pytest.raises(base.UserError, match=r"rope_freqs\.weight"):
        gguf.read(path, "float32")


def tokenizer(tmp_path, pre, fields=None):
    config = CONFIGS["qwen2"]
    write(tmp_path / "m.gguf", "qwen2", config, params_of(config), pre=pre, fields=fields)
    return gguf.read(tmp_path / "m.gguf", "float32")


def pieces(found, text, **options):
    return found.tokenizer.convert_ids_to_tokens(found.tokenizer(text, **options)["input_ids"])


def test_each_pre_tokenizer_cuts_digits_its_own_way(tmp_path):
    smollm = tokenizer(tmp_path, "smollm")
    assert pieces(smollm, "12 12") == ["1", "2", "Ġ", "1", "2"]
    qwen2 = tokenizer(tmp_path, "qwen2")
    assert pieces(qwen2, "12 12") == ["1", "2", "Ġ", "1", "2"]
    llama = tokenizer(tmp_path, "llama-bpe", {"tokenizer.ggml.add_bos_token": False})
    assert pieces(llama, "12 12") == ["12", "Ġ", "12"]


def test_only_llama_takes_a_word_that_is_a_token_without_its_merges(tmp_path):
    assert pieces(tokenizer(tmp_path, "smollm"), " ab") == ["Ġ", "ab"]
    llama = tokenizer(tmp_path, "llama-bpe", {"tokenizer.ggml.add_bos_token": False})
    assert pieces(llama, " ab") == ["Ġab"]


def test_only_smollm_cuts_a_line_break_from_the_mark_before_it(tmp_path):
    assert pieces(tokenizer(tmp_path, "smollm"), "!\n") == ["!", "Ċ"]
    assert pieces(tokenizer(tmp_path, "qwen2"), "!\n") == ["!Ċ"]


def test_only_qwen_composes_accents(tmp_path):
    decomposed = "e\u0301"
    assert pieces(tokenizer(tmp_path, "qwen2"), decomposed) == ["Ã", "©"]
    assert pieces(tokenizer(tmp_path, "smollm"), decomposed) == ["e", "Ì", "ģ"]


def test_text_survives_and_special_tokens_are_one_id_each(tmp_path):
    for pre in ("smollm", "qwen2"):
        found = tokenizer(tmp_path, pre)
        text = "Is 3+4 = 7?\n\n\tYes — “naïve” 你好 🙂  x_1"
        assert found.tokenizer.decode(found.tokenizer(text)["input_ids"]) == text
        turn = "<|im_start|>a<think>b<|im_end|>"
        assert found.tokenizer(turn)["input_ids"] == [260, 97, 263, 98, 261]
        assert (
            found.tokenizer.decode([260, 97, 263, 98, 261], skip_special_tokens=True) == "a<think>b"
        )


def test_bos_is_added_to_plain_text_exactly_when_the_file_says_so(tmp_path):
    """A9."""
    bos = {"tokenizer.ggml.bos_token_id": 262}
    for add, expected in ((True, [262, 97]), (False, [97])):
        fields = bos | {"tokenizer.ggml.add_bos_token": add}
        found = tokenizer(tmp_path, "smollm", fields)
        assert found.tokenizer("a")["input_ids"] == expected
        assert found.tokenizer("a", add_special_tokens=False)["input_ids"] == [97]
    assert tokenizer(tmp_path, "llama-bpe", bos).tokenizer("a")["input_ids"] == [262, 97]
    assert tokenizer(tmp_path, "qwen2", bos).tokenizer("a")["input_ids"] == [97]


def test_end_tokens_pad_and_template_come_from_the_metadata(tmp_path):
    """A7."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fields = {"tokenizer.ggml.eot_token_id": 262, "tokenizer.chat_template": template}
    found = tokenizer(tmp_path, "qwen2", fields)
    assert found.stops == (261, 262)
    assert (found.tokenizer.eos_token_id, found.tokenizer.pad_token_id) == (261, 262)
    assert found.tokenizer.chat_template == template
    assert tokenizer(tmp_path, "qwen2").tokenizer.chat_template is None


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"tokenizer.ggml.pre": "deepseek-coder"}, "deepseek-coder"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"qwen2.rope.scaling.type": "yarn"}, "yarn"),
        ({"qwen2.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"qwen2.attention.sliding_window": 64}, "sliding_window"),
        ({"qwen2.expert_count": 8}, "expert_count"),
        ({"split.count": 2}, "2 parts"),
        ({"tokenizer.ggml.add_bos_token": True}, "bos_token_id"),
    ],
)
def test_metadata_that_would_be_read_wrongly_is_refused(fields, named, tmp_path, monkeypatch):
    monkeypatch.setattr(library.GGUFWriter, "add_tokenizer_pre", lambda out, pre: None)
    monkeypatch.setattr(library.GGUFWriter, "add_tokenizer_model", lambda out, model: None)
    defaults = {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.model": "gpt2"}
    with pytest.raises(base.UserError, match=named):
        tokenizer(tmp_path, "", defaults | fields)


def test_other_families_types_and_files_are_refused_by_name(tmp_path):
    config, path = CONFIGS["llama"], tmp_path / "m.gguf"
    write(path, "gemma2", config, params_of(config))
    with pytest.raises(base.UserError, match="gemma2"):
        gguf.read(path, "float32")
    write(path, "llama", config, params_of(config), "Q5_0")
    with pytest.raises(base.UserError, match="Q5_0"):
        gguf.read(path, "float32")
    write(path, "llama", config, params_of(config), extra=[("blk.0.odd", np.zeros(2, np.float32))])
    with pytest.raises(base.UserError, match=r"unknown: blk\.0\.odd"):
        gguf.read(path, "float32")
    path.write_bytes(b"GGML, an older format")
    with pytest.raises(base.UserError, match="cannot read"):
        gguf.read(path, "float32")


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(base.UserError, match=r"fastgrpo-jax\[gguf\]"):
        gguf.read(tmp_path / "m.gguf", "float32")
