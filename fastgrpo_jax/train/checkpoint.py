"""Checkpoints by orbax: the whole train state, and the little else that a resumed run needs.

A step directory N holds the state after N steps. Orbax writes into a temporary directory and
renames it, so a kill during a save leaves the previous checkpoint.
"""

import contextlib
import logging
import os
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from fastgrpo_jax import base

FOLDER = "checkpoints"


def steps(workdir: str | os.PathLike) -> list[int]:
    """List the steps that a workdir has checkpoints of, ascending."""
    folder = pathlib.Path(workdir) / FOLDER
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit() and any(p.iterdir()))


def open_manager(workdir: str | os.PathLike, keep: int) -> ocp.CheckpointManager:
    """Open a workdir's checkpoints, of which the newest `keep` are kept.

    Raises:
      UserError: if `keep` is below 1, or the folder cannot be made.
    """
    if keep < 1:
        raise base.UserError(f"checkpoint.keep is {keep}; allowed: 1 or more")
    folder = pathlib.Path(workdir).resolve() / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise base.UserError(f"{folder} cannot be a folder: {error.strerror}") from error
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
    return ocp.CheckpointManager(folder, options=options)


def save(manager: ocp.CheckpointManager, state: base.TrainState, extra: dict[str, Any]) -> None:
    """Save the state after its step, with JSON values `extra`; waits for nothing but the copy.

    With LoRA the policy's own weights, which stand still, are left out.
    """
    step = int(state.step)
    if step in manager.all_steps():
        return
    manager.save(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(_kept(state)), extra=ocp.args.JsonSave(extra)
        ),
    )


def restore(
    manager: ocp.CheckpointManager, like: base.TrainState
) -> tuple[base.TrainState, dict[str, Any]]:
    """Restore the newest checkpoint into the shapes of `like`.

    Raises:
      UserError: if it does not fit, such as a checkpoint of another model.
    """
    step = manager.latest_step()
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, _kept(like))
    args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), extra=ocp.args.JsonRestore())
    try:
        with _silent_orbax():
            found = manager.restore(step, args=args)
    except Exception as error:  # whatever tensorstore makes of damaged files
        lines = str(error).strip().splitlines() or [type(error).__name__]
        older = [str(s) for s in manager.all_steps() if s < step]
        cure = f"delete that folder to go on after step {older[-1]}" if older else "begin anew"
        raise base.UserError(
            f"checkpoint {step} in {manager.directory} cannot be restored: it is damaged, or of "
            f"another model ({lines[0][:200]}); use another workdir, or {cure}"
        ) from error
    state = base.TrainState(*found["state"])
    return state if like.adapters is None else state._replace(params=like.params), found["extra"]


def read(workdir: str | os.PathLike, step: int, parts: tuple[str, ...]) -> dict[str, Any]:
    """Read some parts of the state of one checkpoint, as NumPy arrays: little more memory than
    theirs is needed, and no mesh.

    Raises:
      UserError: if the checkpoint is damaged, or lacks a part.
    """
    path = pathlib.Path(workdir).resolve() / FOLDER / str(step) / "state"
    handler = ocp.PyTreeCheckpointHandler()
    try:
        with _silent_orbax():
            tree = handler.metadata(path).tree
            item = {name: jax.tree.map(_shape, tree[name]) for name in parts}
            how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
            args = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
            return handler.restore(path, args=args)
    except Exception as error:  # whatever tensorstore makes of damaged files
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise base.UserError(
            f"checkpoint {step} in {workdir} cannot be read: {first[:200]}"
        ) from error


def _shape(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _kept(state: base.TrainState) -> base.TrainState:
    return state if state.adapters is None else state._replace(params=None)


@contextlib.contextmanager
def _silent_orbax():
    """Keep orbax from logging an error that is then raised, and so told once by us."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
