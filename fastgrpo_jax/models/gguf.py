"""GGUF files: metadata to `PolicyConfig` and tokenizer, dequantised tensors to a params tree.

llama.cpp rotates the pairs (2i, 2i + 1) of a head in its Llama graph, so its converter permutes
the rows of q and k; that is undone here. Its Qwen graphs rotate halves, as we do.
"""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from fastgrpo_jax import base
from fastgrpo_jax.models import hf, hf_config

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROPE_FACTORS = "rope_freqs.weight"
CONTROL, USER_DEFINED = 3, 4  # token types

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Split(NamedTuple):
    """How a family cuts text before its byte-level BPE, and whether BOS is its default."""

    pattern: str | None  # None: single digits, then GPT-2's own pattern
    nfc: bool = False
    ignore_merges: bool = False  # a word that is itself a token is taken whole
    add_bos: bool = False


SPLITS = {
    "smollm": Split(None),
    "qwen2": Split(_WORDS.replace("DIGITS", r"\p{N}"), nfc=True),
    "llama-bpe": Split(_WORDS.replace("DIGITS", r"\p{N}{1,3}"), ignore_merges=True, add_bos=True),
}


class Model(NamedTuple):
    """What a GGUF file holds; `stops` are the end tokens that its metadata declares."""

    config: base.PolicyConfig
    params: base.Params
    tokenizer: Any
    stops: tuple[int, ...]


def read(path: pathlib.Path, dtype: str) -> Model:
    """Read a model. Raises UserError for a file, family, tensor or tokenizer not supported."""
    library = _library()
    try:
        reader = library.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (OSError, ValueError, IndexError) as e:
        raise base.UserError(f"cannot read {path} as GGUF: {e}") from e
    if fields.get("split.count", 1) > 1:
        raise base.UserError(f"{path} is one of {fields['split.count']} parts; merge them first")
    tensors = {t.name: t for t in reader.tensors}
    other = sorted({t.tensor_type.name for t in reader.tensors} - set(TYPES))
    if other:
        raise base.UserError(
            f"{path} holds tensors of type {', '.join(other)}; allowed: {', '.join(TYPES)}"
        )

    def fetch(name: str) -> np.ndarray:
        t = tensors[name]
        x = library.quants.dequantize(t.data, t.tensor_type).reshape(_shape(t))
        part = name.split(".")[-2]
        if fields["general.architecture"] == "llama" and part in ("attn_q", "attn_k"):
            x = unpermute(x, config.heads if part == "attn_q" else config.kv_heads)
        return x

    config = _config(fields, tensors, dtype)
    if ROPE_FACTORS in tensors:
        scaling = _rope_scaling(fetch(ROPE_FACTORS).ravel(), config)
        config = dataclasses.replace(config, rope_scaling=scaling)
    slots = {_name(name): slot for name, slot in hf.layout(config).items()}
    shapes = {name: _shape(t) for name, t in tensors.items() if name != ROPE_FACTORS}
    params = hf.fill(slots, shapes, fetch, str(path))
    ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    stops = tuple(int(fields[key]) for key in ends if key in fields)
    return Model(config, params, _tokenizer(fields), stops)


def unpermute(x: np.ndarray, heads: int) -> np.ndarray:
    """Bring the rows of each head from llama.cpp's order (pairs) to ours (halves)."""
    pairs = x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:])
    return pairs.swapaxes(1, 2).reshape(x.shape)


def _library() -> Any:
    try:
        import gguf
    except ImportError as e:
        raise base.UserError(
            "reading a GGUF file needs the gguf library: pip install 'fastgrpo-jax[gguf]'"
        ) from e
    return gguf


def _shape(tensor) -> tuple[int, ...]:
    return tuple(int(n) for n in tensor.shape[::-1])  # GGUF names the fastest axis first


def _name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in MODULES:
        return f"{MODULES[module]}.{kind}"
    _, _, i, part = module.split(".", 3)
    return f"blk.{i}.{MODULES[part]}.{kind}"


def _config(fields: dict[str, Any], tensors: dict[str, Any], dtype: str) -> base.PolicyConfig:
    arch = _field(fields, "general.architecture")
    if arch not in hf_config.FAMILIES:
        raise base.UserError(
            f"general.architecture is {arch!r}; allowed: {', '.join(hf_config.FAMILIES)}"
        )
    hidden = _field(fields, f"{arch}.embedding_length")
    heads = _field(fields, f"{arch}.attention.head_count")
    head_dim = fields.get(f"{arch}.attention.key_length", hidden // heads)
    for key, allowed in {
        "rope.scaling.type": "none",
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
        "attention.sliding_window": 0,
        "expert_count": 0,
    }.items():
        value = fields.get(f"{arch}.{key}", allowed)
        if value != allowed:
            raise base.UserError(f"{arch}.{key} is {value!r}; allowed: {allowed!r}")
    if "token_embd.weight" not in tensors:
        raise base.UserError("the GGUF file has no tensor token_embd.weight")
    return base.PolicyConfig(
        vocab=_shape(tensors["token_embd.weight"])[0],
        hidden=hidden,
        layers=_field(fields, f"{arch}.block_count"),
        heads=heads,
        kv_heads=fields.get(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=_field(fields, f"{arch}.feed_forward_length"),
        max_positions=_field(fields, f"{arch}.context_length"),
        rope_theta=float(fields.get(f"{arch}.rope.freq_base", 10000.0)),
        norm_eps=float(_field(fields, f"{arch}.attention.layer_norm_rms_epsilon")),
        tied="output.weight" not in tensors,
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        qk_norm=arch == "qwen3",
        dtype=dtype,
    )


def _rope_scaling(factors: np.ndarray, config: base.PolicyConfig) -> base.RopeScaling | None:
    """Recognise Llama 3's scaling in the divisors that stand in for its parameters.

    The converter drops three of the four numbers; every Llama 3.x has the ones tried here,
    and the divisors they imply must agree.
    """
    if np.all(factors == 1):
        return None
    scaling = base.RopeScaling(float(factors.max()), 1.0, 4.0, 8192)
    freq = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    turns = scaling.original_max_positions * freq / (2 * np.pi)
    keep = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1 / (keep + (1 - keep) / scaling.factor)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise base.UserError(
            f"{ROPE_FACTORS} is not Llama 3's scaling (low 1, high 4, 8192 positions): {factors}"
        )
    return scaling


def _tokenizer(fields: dict[str, Any]) -> Any:
    kind, pre = _field(fields, "tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in SPLITS:
        raise base.UserError(
            f"tokenizer.ggml.model is {kind!r} and tokenizer.ggml.pre {pre!r}; "
            f"allowed: gpt2 with {', '.join(SPLITS)}"
        )
    inner = _bpe(fields, SPLITS[pre])
    named = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if f"tokenizer.ggml.{key}_token_id" in fields:
            named[f"{role}_token"] = inner.id_to_token(fields[f"tokenizer.ggml.{key}_token_id"])
    if fields.get("tokenizer.ggml.add_bos_token", SPLITS[pre].add_bos):
        i = int(_field(fields, "tokenizer.ggml.bos_token_id"))
        bos = inner.id_to_token(i)
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, i)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _bpe(fields: dict[str, Any], split: Split) -> tokenizers.Tokenizer:
    tokens = _field(fields, "tokenizer.ggml.tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise base.UserError("tokenizer.ggml.tokens holds a token twice")
    merges = [tuple(pair.split(" ")) for pair in _field(fields, "tokenizer.ggml.merges")]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=split.ignore_merges)
    )
    if split.nfc:
        inner.normalizer = normalizers.NFC()
    if split.pattern is None:
        cut = pre_tokenizers.Digits(individual_digits=True)
    else:
        cut = pre_tokenizers.Split(tokenizers.Regex(split.pattern), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None)
    inner.pre_tokenizer = pre_tokenizers.Sequence([cut, whole])
    inner.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, _field(fields, "tokenizer.ggml.token_type")):
        if kind in (CONTROL, USER_DEFINED):
            added = tokenizers.AddedToken(token, normalized=False, special=kind == CONTROL)
            inner.add_tokens([added])
    return inner


def _field(fields: dict[str, Any], key: str) -> Any:
    if key not in fields:
        raise base.UserError(f"the GGUF file lacks the field {key}")
    return fields[key]
