"""Drafters as servers name them: EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858).

A directory with config.json and model.safetensors: `fc` over the embedding and the target's last
feature, side by side, and `layers.0` without an input norm. It has no head; the target's is used.
The other heads that this package trains have no such format.
"""

import json
import pathlib
from typing import Any

import numpy as np
import safetensors
from safetensors import numpy as st_numpy

from fastgrpo_jax import base
from fastgrpo_jax.models import hf, hf_config

EMBED, BIAS = "embed_tokens.weight", "fc.bias"


def layout(config: base.EagleConfig) -> dict[str, hf.Slot]:
    """List every tensor of a drafter under its name, the target's embedding left out."""
    c = config
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    kernels = {
        "fc": (("fc",), c.hidden, 2 * c.hidden),
        "layers.0.self_attn.q_proj": (("attn", "q"), queries, c.hidden),
        "layers.0.self_attn.k_proj": (("attn", "k"), keys, c.hidden),
        "layers.0.self_attn.v_proj": (("attn", "v"), keys, c.hidden),
        "layers.0.self_attn.o_proj": (("attn", "o"), c.hidden, queries),
        "layers.0.mlp.gate_proj": (("mlp", "gate"), c.ffn, c.hidden),
        "layers.0.mlp.up_proj": (("mlp", "up"), c.ffn, c.hidden),
        "layers.0.mlp.down_proj": (("mlp", "down"), c.hidden, c.ffn),
    }
    slots = {
        f"{name}.weight": hf.Slot((*path, "kernel"), (outputs, inputs), transposed=True)
        for name, (path, outputs, inputs) in kernels.items()
    }
    if c.fc_bias:
        slots[BIAS] = hf.Slot(("fc", "bias"), (c.hidden,))
    norm = hf.Slot(("mlp_norm", "scale"), (c.hidden,))
    return slots | {"layers.0.post_attention_layernorm.weight": norm}


def save(
    directory: str | pathlib.Path,
    config: base.EagleConfig,
    params: base.Params,
    policy: base.PolicyConfig,
    embed: np.ndarray,
) -> None:
    """Write a drafter of kind `eagle` that reads the last feature alone, with its policy's embedding.

    A bias of `fc` is always there, 0 where the drafter has none: one server expects it, and others
    pass over it.

    Raises:
      UserError: for another drafter.
    """
    check_exportable(config)
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {EMBED: embed, **hf.state_of(layout(config), params)}
    state.setdefault(BIAS, np.zeros(config.hidden, state["fc.weight"].dtype))
    raw = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": policy.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": policy.max_positions,
        "tie_word_embeddings": policy.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": str(embed.dtype),
    }
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    state = {name: np.ascontiguousarray(x) for name, x in state.items()}
    st_numpy.save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def check_exportable(config: base.EagleConfig | None) -> None:
    """Refuse drafters that no server knows.

    Raises:
      UserError: saying what can be done.
    """
    if config is None:
        raise base.UserError("--to is 'eagle', but the run has no learned drafter")
    if config.kind != "eagle" or config.taps:
        raise base.UserError(
            f"--to is 'eagle', but the drafter is of kind {config.kind!r} and reads "
            f"{max(len(config.taps), 1)} depths, which no server knows; allowed: runs with "
            "drafter.kind=eagle and drafter.features=1. This package loads the run's "
            "drafter.safetensors by drafter.init"
        )


def load(
    directory: str | pathlib.Path, policy: base.PolicyConfig
) -> tuple[base.EagleConfig, base.Params]:
    """Read an EAGLE drafter for a policy; it computes in the policy's dtype.

    Raises:
      UserError: for a drafter of another format, or of a target of another size.
    """
    directory = pathlib.Path(directory)
    raw = hf_config.read_json(directory / "config.json")
    path = directory / "model.safetensors"
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            config = _shape(raw, shapes, policy, str(directory))
            for copied in (EMBED, hf.HEAD):  # from the target, which has its own
                shapes.pop(copied, None)
            return config, hf.fill(layout(config), shapes, file.get_tensor, str(directory))
    except (OSError, safetensors.SafetensorError) as error:
        raise base.UserError(f"cannot read the drafter {str(path)!r}: {error}") from error


def _shape(raw: dict[str, Any], shapes, policy: base.PolicyConfig, source: str):
    if any(name.startswith(("midlayer.", "d2t", "t2d")) for name in shapes):
        raise base.UserError(
            f"{source!r} holds an EAGLE-3 drafter; allowed: EAGLE-1 or 2, or a drafter.safetensors"
        )
    if "fc.weight" not in shapes:
        raise base.UserError(f"{source!r} holds no EAGLE drafter (there is no fc.weight in it)")
    inner = hf_config.policy_config(raw | {"model_type": "llama"}, policy.dtype)
    differ = [
        f"{field} {getattr(inner, field)} for {getattr(policy, field)}"
        for field in ("hidden", "vocab")
        if getattr(inner, field) != getattr(policy, field)
    ]
    if differ:
        raise base.UserError(f"{source!r} is a drafter of another model: {', '.join(differ)}")
    if inner.layers != 1 or inner.rope_scaling:
        raise base.UserError(
            f"{source!r} has {inner.layers} layers and RoPE scaling {inner.rope_scaling}; allowed: "
            "one layer, without scaling"
        )
    return base.EagleConfig(
        kind="eagle",
        hidden=inner.hidden,
        heads=inner.heads,
        kv_heads=inner.kv_heads,
        head_dim=inner.head_dim,
        ffn=inner.ffn,
        rope_theta=inner.rope_theta,
        norm_eps=inner.norm_eps,
        dtype=policy.dtype,
        fc_bias=BIAS in shapes,
    )
