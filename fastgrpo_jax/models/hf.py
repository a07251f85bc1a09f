"""Hugging Face checkpoints: safetensors to a params tree and back.

One table (`layout`) says where every tensor belongs; reading, writing and the GGUF reader all
follow it. Names and shapes are compared with the headers before a weight is read, and tensors
are read one at a time, so a checkpoint costs little more memory than its float32 params.
"""

import contextlib
import pathlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import safetensors
from flax import traverse_util

from fastgrpo_jax import base
from fastgrpo_jax.models import hf_config

HEAD = "lm_head.weight"
FLOATS = ("F32", "F16", "BF16", "F64")


class Slot(NamedTuple):
    """Where a tensor goes: keys into the params tree, and its shape in the file.

    A transposed one is a kernel: [out, in] in the file, [in, out] here.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False


def layout(config: base.PolicyConfig) -> dict[str, Slot]:
    """List every tensor of a checkpoint under its Hugging Face name."""
    c = config
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    linears = (  # name in the file, path here, outputs, inputs, bias
        ("self_attn.q_proj", ("attn", "q"), queries, c.hidden, c.qkv_bias),
        ("self_attn.k_proj", ("attn", "k"), keys, c.hidden, c.qkv_bias),
        ("self_attn.v_proj", ("attn", "v"), keys, c.hidden, c.qkv_bias),
        ("self_attn.o_proj", ("attn", "o"), c.hidden, queries, c.o_bias),
        ("mlp.gate_proj", ("mlp", "gate"), c.ffn, c.hidden, False),
        ("mlp.up_proj", ("mlp", "up"), c.ffn, c.hidden, False),
        ("mlp.down_proj", ("mlp", "down"), c.hidden, c.ffn, False),
    )
    norms = [("input_layernorm", ("attn_norm",), c.hidden)]
    norms += [("post_attention_layernorm", ("mlp_norm",), c.hidden)]
    if c.qk_norm:
        norms += [("self_attn.q_norm", ("attn", "q_norm"), c.head_dim)]
        norms += [("self_attn.k_norm", ("attn", "k_norm"), c.head_dim)]
    slots = {"model.embed_tokens.weight": Slot(("embed",), (c.vocab, c.hidden))}
    for i in range(c.layers):
        here, there = f"layer_{i}", f"model.layers.{i}"
        for name, path, outputs, inputs, bias in linears:
            weight = Slot((here, *path, "kernel"), (outputs, inputs), transposed=True)
            slots[f"{there}.{name}.weight"] = weight
            if bias:
                slots[f"{there}.{name}.bias"] = Slot((here, *path, "bias"), (outputs,))
        for name, path, size in norms:
            slots[f"{there}.{name}.weight"] = Slot((here, *path, "scale"), (size,))
    slots["model.norm.weight"] = Slot(("norm", "scale"), (c.hidden,))
    if not c.tied:
        slots[HEAD] = Slot(("head",), (c.vocab, c.hidden))
    return slots


def fill(
    slots: dict[str, Slot],
    shapes: dict[str, tuple[int, ...]],
    fetch: Callable[[str], np.ndarray],
    source: str,
) -> base.Params:
    """Fill a float32 params tree with `fetch(name)` of every slot.

    `shapes` holds all that the file has. Raises UserError that lists every missing, unknown
    and misshaped tensor, before anything is fetched.
    """
    wrong = {
        "missing": [name for name in slots if name not in shapes],
        "unknown": [name for name in shapes if name not in slots],
        "misshaped": [
            f"{name} (found {list(shapes[name])}, expected {list(slot.shape)})"
            for name, slot in slots.items()
            if name in shapes and tuple(shapes[name]) != slot.shape
        ],
    }
    found = [f"{kind}: {_some(names)}" for kind, names in wrong.items() if names]
    if found:
        raise base.UserError(f"{source} does not fit its configuration; {'; '.join(found)}")
    flat = {}
    for name, slot in slots.items():
        x = fetch(name)
        flat[slot.path] = np.array(x.T if slot.transposed else x, np.float32, order="C")
    return traverse_util.unflatten_dict(flat)


def read_params(directory: pathlib.Path, config: base.PolicyConfig) -> base.Params:
    """Read model.safetensors, or the shards of its index, into a float32 params tree.

    The body may have any prefix in place of `model.`, or none. A tied checkpoint may repeat
    the embedding as lm_head. Raises UserError for files or tensors that do not fit.
    """
    with contextlib.ExitStack() as stack:
        where = _open(directory, stack)
        headers = {name: file.get_slice(name) for name, file in where.items()}
        other = sorted({h.get_dtype() for h in headers.values()} - set(FLOATS))
        if other:
            raise base.UserError(
                f"{directory} holds {', '.join(other)} tensors; allowed: {', '.join(FLOATS)}"
            )
        shapes = {name: tuple(h.get_shape()) for name, h in headers.items()}

        def fetch(name: str) -> np.ndarray:
            return where[name].get_tensor(name)

        embed, head = _own_name("model.embed_tokens.weight", shapes), _own_name(HEAD, shapes)
        if config.tied and head in shapes and embed in shapes:
            if shapes[head] != shapes[embed] or not np.array_equal(fetch(head), fetch(embed)):
                raise base.UserError(
                    f"{directory}: tie_word_embeddings is true, yet {head} differs from {embed}; "
                    "set tie_word_embeddings to false to use both"
                )
            del shapes[head]
        slots = {_own_name(name, where): slot for name, slot in layout(config).items()}
        return fill(slots, shapes, fetch, str(directory))


def to_hf_state(params: base.Params, config: base.PolicyConfig) -> dict[str, np.ndarray]:
    """Turn a params tree into a state dict under Hugging Face names: the reverse of reading.

    Arrays keep their dtype and are contiguous; a tied head is not repeated.
    """
    return state_of(layout(config), params)


def state_of(slots: dict[str, Slot], params: base.Params) -> dict[str, np.ndarray]:
    """Take each slot's tensor out of a params tree, as its file has it."""
    flat = traverse_util.flatten_dict(params)
    state = {}
    for name, slot in slots.items():
        x = np.asarray(flat[slot.path])
        state[name] = np.ascontiguousarray(x.T if slot.transposed else x)
        if state[name].shape != slot.shape:
            raise base.UserError(f"{name} has shape {state[name].shape}, expected {slot.shape}")
    return state


def _open(directory: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Open the files; return the one that holds each tensor."""
    where = {}
    for path in _files(directory):
        try:
            file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
        except (OSError, safetensors.SafetensorError) as e:
            raise base.UserError(f"cannot read {path}: {e}") from e
        for name in file.keys():
            if name in where:
                raise base.UserError(f"{directory} holds the tensor {name} twice")
            if not name.endswith("rotary_emb.inv_freq"):  # old files store it; it is computed
                where[name] = file
    return where


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise base.UserError(f"{directory} has neither {single.name} nor {index.name}")
    shards = hf_config.read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise base.UserError(f"{index} has no weight_map")
    files = [directory / name for name in sorted(set(shards.values()))]
    absent = [f.name for f in files if not f.is_file()]
    if absent:
        raise base.UserError(f"{index} names shards that are absent: {_some(absent)}")
    return files


def _own_name(name: str, found: Collection[str]) -> str:
    """Say how a checkpoint that has some prefix, or none, in place of `model.` calls a tensor."""
    anchor = "embed_tokens.weight"
    prefix = next((n.removesuffix(anchor) for n in found if n.endswith(anchor)), "model.")
    if name != HEAD:
        return prefix + name.removeprefix("model.")
    outer = prefix.removesuffix("model.") + HEAD
    return outer if outer in found else HEAD


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
