"""A random model of 0.1 million parameters and its character tokenizer, made in code.

For tests and quick looks: it needs no download, and its weights depend on the seed alone
(NumPy draws them, so JAX's precision flags change nothing).
"""

import string
from typing import Any

import numpy as np
import tokenizers
import transformers
from flax import traverse_util
from tokenizers import decoders, models

from fastgrpo_jax import base
from fastgrpo_jax.models import hf

SPECIALS = ("<pad>", "<|im_start|>", "<|im_end|>", "<unk>")
CHARACTERS = "\n " + string.digits + string.ascii_letters + string.punctuation
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config(dtype: str) -> base.PolicyConfig:
    """Describe the model: two Llama layers over the tokenizer's 100 ids."""
    return base.PolicyConfig(
        vocab=len(SPECIALS) + len(CHARACTERS),
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=128,
        max_positions=4096,
        dtype=dtype,
    )


def params(config: base.PolicyConfig, seed: int) -> base.Params:
    """Draw float32 weights (normal, deviation 0.02); norms are ones, biases zeros."""
    rng = np.random.default_rng(seed)
    constant = {"scale": np.ones, "bias": np.zeros}
    flat = {}
    for slot in hf.layout(config).values():
        shape = slot.shape[::-1] if slot.transposed else slot.shape
        if slot.path[-1] in constant:
            flat[slot.path] = constant[slot.path[-1]](shape, np.float32)
        else:
            flat[slot.path] = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    return traverse_util.unflatten_dict(flat)


def tokenizer() -> Any:
    """Build the tokenizer: one id per printable ASCII character or newline, ChatML turns."""
    vocab = {token: i for i, token in enumerate((*SPECIALS, *CHARACTERS))}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.decoder = decoders.Fuse()  # without it decoding would put spaces between characters
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
