"""A policy as a directory in Hugging Face's format, which `load` and transformers read."""

import json
import pathlib
from typing import Any

import numpy as np
from safetensors import numpy as st_numpy

from fastgrpo_jax import base
from fastgrpo_jax.models import hf, hf_config


def save(
    directory: str | pathlib.Path,
    config: base.PolicyConfig,
    params: base.Params,
    tokenizer: Any,
    stop_tokens: tuple[int, ...],
) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files.

    Weights keep their dtype. The directory is made; files of the same names are replaced.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    ends = {"eos_token_id": list(stop_tokens), "pad_token_id": tokenizer.pad_token_id}
    state = hf.to_hf_state(params, config)
    raw = hf_config.to_raw(config) | ends | {"dtype": str(next(iter(state.values())).dtype)}
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    tokenizer.save_pretrained(directory)
    state = {name: np.ascontiguousarray(x) for name, x in state.items()}
    st_numpy.save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
