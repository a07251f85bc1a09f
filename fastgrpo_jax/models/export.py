"""A policy as a directory in Hugging Face's format, which `load`, transformers and servers read."""

import json
import pathlib
from typing import Any

import huggingface_hub
import numpy as np
from flax import traverse_util
from safetensors import numpy as st_numpy

from fastgrpo_jax import base
from fastgrpo_jax.models import hf, hf_config, lora

SHARD_BYTES = 5 * 10**9
PEFT_NAMES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
              "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
              "down": "mlp.down_proj"}  # fmt: skip


def save(
    directory: str | pathlib.Path,
    config: base.PolicyConfig,
    params: base.Params,
    tokenizer: Any,
    stop_tokens: tuple[int, ...],
    source: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json, generation_config.json, weights as safetensors, and the tokenizer's files.

    Weights keep their dtype; above `shard_bytes` they are split into files with an index. The
    directory is made; files of the same names are replaced.

    Args:
      source: the config.json that the policy was read from; what the decoder does not know of it
        is kept. None: one is made of `config`.
      generation: its generation_config.json, of which all but the end tokens is kept.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = hf.to_hf_state(params, config)
    dtype = str(next(iter(state.values())).dtype)
    ends = {"eos_token_id": list(stop_tokens), "pad_token_id": tokenizer.pad_token_id}
    raw = {k: v for k, v in (source or hf_config.to_raw(config)).items() if k != "torch_dtype"}
    _write_json(directory / "config.json", raw | ends | {"dtype": dtype})
    _write_json(directory / "generation_config.json", (generation or {}) | ends)
    tokenizer.save_pretrained(directory)
    split = huggingface_hub.split_state_dict_into_shards_factory(
        state,
        get_storage_size=lambda x: x.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for name, tensors in split.filename_to_tensors.items():
        part = {tensor: state[tensor] for tensor in tensors}
        st_numpy.save_file(part, directory / name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(directory / "model.safetensors.index.json", index)


def save_adapter(
    directory: str | pathlib.Path, config: lora.LoraConfig, adapters: base.Params, base_model: str
) -> None:
    """Write LoRA adapters as PEFT reads them: adapter_config.json and adapter_model.safetensors."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {}
    for (layer, *_, name, leaf), x in traverse_util.flatten_dict(adapters).items():
        place = f"base_model.model.model.layers.{layer.removeprefix('layer_')}.{PEFT_NAMES[name]}"
        state[f"{place}.lora_{leaf.upper()}.weight"] = np.ascontiguousarray(np.asarray(x).T)
    targets = [PEFT_NAMES[name].rpartition(".")[2] for name in config.targets]
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    _write_json(directory / "adapter_config.json", about)
    st_numpy.save_file(state, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _write_json(path: pathlib.Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=2) + "\n")
