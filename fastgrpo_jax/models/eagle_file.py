"""A learned drafter in a file: safetensors with the shape of the drafter in its metadata."""

import dataclasses
import json
import os
import pathlib

import numpy as np
import safetensors
from flax import traverse_util
from safetensors import numpy as st_numpy

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle, eagle_hf

NAME = "drafter.safetensors"  # in a workdir
FORMAT = "fastgrpo_jax drafter 1"


def save(
    path: str | os.PathLike,
    config: base.EagleConfig,
    params: base.Params,
    counts: dict[str, int] | None = None,
) -> None:
    """Write a drafter's weights (float32) and shape, atomically.

    `counts` are those of the token ids that it was trained on; they rank its vocabulary.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    state = {name: np.ascontiguousarray(x, np.float32) for name, x in flat.items()}
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    shape = json.dumps(dataclasses.asdict(config))
    meta = {"format": FORMAT, "config": shape, "counts": json.dumps(counts or {})}
    st_numpy.save_file(state, part, metadata=meta)
    os.replace(part, path)


def load(
    path: str | os.PathLike, policy: base.PolicyConfig
) -> tuple[base.EagleConfig, base.Params, dict[str, int]]:
    """Read a drafter for a policy, and its counts; it computes in the policy's dtype.

    `path` is a file, a folder that has one of the name that runs give it, or a published drafter's
    folder (see `eagle_hf`), which has no counts.

    Raises:
      UserError: for a file that is none, or a drafter of another model's shape.
    """
    folder = pathlib.Path(path)
    if folder.is_dir():
        if not (folder / NAME).is_file() and (folder / "model.safetensors").is_file():
            return *eagle_hf.load(folder, policy), {}
        path = folder / NAME
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            meta = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, safetensors.SafetensorError) as error:
        raise base.UserError(f"cannot read the drafter {str(path)!r}: {error}") from error
    if meta.get("format") != FORMAT:
        raise base.UserError(f"{str(path)!r} is no drafter file ({FORMAT!r} is not in it)")
    shape = json.loads(meta["config"])
    shape |= {"dtype": policy.dtype, "taps": tuple(shape.get("taps", ()))}
    config = base.EagleConfig(**shape)
    wanted = eagle.config_for(policy, config.kind, max(len(config.taps), 1))
    differ = [
        f"{name} {getattr(config, name)} for {getattr(wanted, name)}"
        for name in ("hidden", "taps")  # the rest is the drafter's own
        if getattr(config, name) != getattr(wanted, name)
    ]
    if differ:
        raise base.UserError(f"{str(path)!r} is a drafter of another model: {', '.join(differ)}")
    counts = json.loads(meta.get("counts", "{}"))
    return config, traverse_util.unflatten_dict(state, sep="/"), counts
