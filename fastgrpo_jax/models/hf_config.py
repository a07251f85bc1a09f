"""config.json of a Hugging Face model to `PolicyConfig`.

Absent keys mean what transformers takes them for. Whatever the decoder would silently get wrong
(another activation, a sliding window, another kind of RoPE scaling) is refused by name.
"""

import json
import pathlib
from typing import Any

from fastgrpo_jax import base

FAMILIES = ("llama", "qwen2", "qwen3")


def policy_config(raw: dict[str, Any], dtype: str) -> base.PolicyConfig:
    """Translate the contents of a config.json; absent keys mean what transformers takes them for.

    Raises UserError for another family, and for any setting the decoder would get wrong.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise base.UserError(f"model_type is {family!r}; allowed: {', '.join(FAMILIES)}")
    _refuse_unsupported(raw)
    hidden, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise base.UserError(
            f"num_attention_heads is {heads}, not a multiple of num_key_value_heads, {kv_heads}"
        )
    head_dim = raw.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
    implied = not raw.get("head_dim") and family != "qwen3"
    if head_dim % 2 or (implied and hidden % heads):
        raise base.UserError(
            f"head_dim is {raw.get('head_dim')}, hidden_size {hidden}, num_attention_heads {heads}; "
            "head_dim must be even and, if absent, hidden_size a multiple of num_attention_heads"
        )
    theta, scaling = _rope(raw)
    bias = family != "qwen2" and bool(raw.get("attention_bias", False))
    return base.PolicyConfig(
        vocab=_size(raw, "vocab_size"),
        hidden=hidden,
        layers=_size(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=_size(raw, "intermediate_size"),
        max_positions=_size(raw, "max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias,
        qk_norm=family == "qwen3",
        dtype=dtype,
    )


def to_raw(config: base.PolicyConfig) -> dict[str, Any]:
    """Describe a policy as a config.json would; `policy_config` reads the same policy from it."""
    c = config
    family = "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias and not c.o_bias else "llama"
    raw = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tied,
        "hidden_act": "silu",
    }
    if family != "qwen2":
        raw["attention_bias"] = c.o_bias
    if c.rope_scaling:
        s = c.rope_scaling
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_positions,
        }
    return raw


_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError if it is absent or broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise base.UserError(f"cannot read {path}: {e}") from e
    if not isinstance(found, dict):
        raise base.UserError(f"{path} holds a {type(found).__name__}, not a JSON object")
    return found


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    act = raw.get("hidden_act", "silu")
    if act != "silu":
        raise base.UserError(f"hidden_act is {act!r}; allowed: silu")
    if raw.get("mlp_bias", False):
        raise base.UserError("mlp_bias is true; allowed: false")
    if raw.get("partial_rotary_factor", 1) != 1:
        raise base.UserError(f"partial_rotary_factor is {raw['partial_rotary_factor']}; allowed: 1")
    if raw.get("quantization_config"):
        raise base.UserError("quantization_config is set; only unquantised weights can be read")
    window = raw.get("sliding_window") if raw.get("use_sliding_window", False) else None
    if raw.get("layer_types"):
        slides = any(kind != "full_attention" for kind in raw["layer_types"])
    else:
        first = raw.get("max_window_layers", 28)  # layers from this one on use the window
        slides = window is not None and first < _size(raw, "num_hidden_layers")
    if slides:
        raise base.UserError(
            f"some layers use a sliding window (sliding_window {raw.get('sliding_window')}, "
            f"layer_types {raw.get('layer_types')}); allowed: full attention in every layer"
        )


def _rope(raw: dict[str, Any]) -> tuple[float, base.RopeScaling | None]:
    """Read both spellings: rope_theta + rope_scaling, and rope_parameters of transformers 5."""
    spelled = {k: raw[k] for k in ("rope_parameters", "rope_scaling") if raw.get(k)}
    thetas = {float(d["rope_theta"]) for d in (raw, *spelled.values()) if d.get("rope_theta")}
    scalings = {_scaling(field, rope) for field, rope in spelled.items()}
    if len(thetas) > 1 or len(scalings) > 1:
        raise base.UserError(
            f"rope_theta {raw.get('rope_theta')}, rope_scaling {raw.get('rope_scaling')} and "
            f"rope_parameters {raw.get('rope_parameters')} contradict each other"
        )
    return thetas.pop() if thetas else 10000.0, scalings.pop() if scalings else None


def _scaling(field: str, rope: dict[str, Any]) -> base.RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    nested = any(isinstance(value, dict) for value in rope.values())
    if nested or kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
        raise base.UserError(
            f"{field} is {rope}; allowed: rope_type default or llama3, for all layers, whole heads"
        )
    if kind == "default":
        return None
    wanted = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    lacking = [name for name in wanted if name not in rope]
    if lacking:
        raise base.UserError(f"{field} of rope_type llama3 lacks {', '.join(lacking)}")
    factor, low, high, positions = (rope[name] for name in wanted)
    return base.RopeScaling(float(factor), float(low), float(high), int(positions))


def _size(raw: dict[str, Any], field: str) -> int:
    value = raw.get(field)
    if not isinstance(value, int) or value < 1:
        raise base.UserError(f"{field} of config.json is {value!r}; it must be a positive integer")
    return value
