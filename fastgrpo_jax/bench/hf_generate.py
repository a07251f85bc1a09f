"""The peer: transformers' `generate` on CPU torch with the same weights, sampled, float32.

Its defaults (SDPA attention, dynamic cache, no compilation); a group is
`num_return_sequences` of one prompt, prompts are padded on the left, the prefill is included.
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fastgrpo_jax.models import export, load


def _torch_model(model: load.LoadedModel):
    """Build the transformers model from our own weights."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        export.save(folder, model.config, model.params, model.tokenizer, model.stop_tokens)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


_models: dict[int, Any] = {}


def player(model: load.LoadedModel, sets, group: int, args, tokens: int) -> Callable[[int], float]:
    """Make the function that generates once and returns tokens per second.

    Its argument is the seed, and takes the sets of prompts in turn.
    """
    import torch

    if id(model) not in _models:
        _models[id(model)] = _torch_model(model)
    net = _models[id(model)]
    stops = list(model.stop_tokens) if args.lengths == "natural" else None

    def play(seed: int) -> float:
        torch.manual_seed(seed)
        ids, mask = _padded(sets[seed % len(sets)])
        net.generation_config.eos_token_id = stops
        net.generation_config.pad_token_id = 0
        began = time.perf_counter()
        with torch.inference_mode():
            out = net.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=args.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=tokens,
                num_return_sequences=group,
            )
        seconds = time.perf_counter() - began
        return _emitted(out[:, ids.shape[1] :].numpy(), stops) / seconds

    return play


def _padded(prompts):
    """Put prompts into one batch, padded on the left: (ids, mask)."""
    import torch

    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    return ids, mask


def _emitted(new: np.ndarray, stops) -> int:
    """Count response tokens up to and including each row's first stop token."""
    if not stops:
        return new.size
    hit = np.isin(new, stops)
    return int(np.where(hit.any(1), hit.argmax(1) + 1, new.shape[1]).sum())
