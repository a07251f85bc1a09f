"""A run's folder: the config it began with, and what a resumed run may change of it."""

import json
import os
import pathlib
import secrets
from importlib import metadata
from typing import Any

import jax

from fastgrpo_jax import base, hosts
from fastgrpo_jax.train import checkpoint, metrics

# Keys that a resumed run may change; the others shape what has been learned.
HARMLESS = (
    "steps",
    "log.",
    "checkpoint.",
    "compilation_cache",
    "mesh.",
    "hosts.",
    "drafter.spot",
    "reward.on_error",
    "task.overlong_prompt",
)


def make(workdir: pathlib.Path) -> None:
    """Make the folder, which all processes must share.

    Raises:
      UserError: if it cannot be made or written, or a process has another one by that name.
    """

    def mark() -> str:
        name = f".seen-{secrets.token_hex(8)}"
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            (workdir / name).touch()
        except OSError as error:
            raise base.UserError(f"--workdir is {str(workdir)!r}: {error.strerror}") from error
        return name

    def look() -> None:
        if not (workdir / name).exists():
            raise base.UserError(
                f"--workdir is {str(workdir)!r}, which is not the folder that process 0 writes to; "
                "allowed: a folder that all processes share"
            )

    name = hosts.from_first(mark)
    try:
        hosts.together(look)
    finally:
        if hosts.first():
            (workdir / name).unlink(missing_ok=True)


def check_alike(c) -> None:
    """Check that all processes run the same thing.

    Raises:
      UserError: naming the first key that differs.
    """
    mine = _flat(c.to_dict()) | {"the version": (metadata.version("fastgrpo-jax"), jax.__version__)}
    first, *others = hosts.exchange(mine)
    for i, other in enumerate(others, 1):
        for name, value in first.items():
            if other.get(name) != value and not name.startswith("hosts."):
                raise base.UserError(
                    f"process {i} has {name} {other.get(name)!r}, process 0 {value!r}; all processes "
                    "must be started alike"
                )


def write_config(c, workdir: pathlib.Path) -> None:
    part = workdir / "config.json.part"
    part.write_text(json.dumps(c.to_dict(), indent=1) + "\n")
    os.replace(part, workdir / "config.json")


def _flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    out = {}
    for name, value in tree.items():
        path = prefix + name
        out |= _flat(value, path + ".") if isinstance(value, dict) else {path: value}
    return out


def check_same_run(c, workdir: pathlib.Path) -> None:
    """Refuse to go on in a workdir whose run had another config, harmless keys apart.

    Raises:
      UserError: showing each difference.
    """
    path = workdir / "config.json"
    if not checkpoint.steps(workdir):
        return
    if not path.exists():
        metrics.say(
            f"warning: {path} is missing, so that this config cannot be compared with the run's"
        )
        return
    try:
        before = json.loads(path.read_text())
        if not isinstance(before, dict):
            raise ValueError("not an object")
        before = _flat(before)
    except ValueError as error:
        raise base.UserError(f"{path} is no config ({error}); restore it or remove it") from error
    now = _flat(c.to_dict())
    changed = [
        f"  {name}: {before.get(name, '(absent)')!r} -> {now.get(name, '(absent)')!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not name.startswith(HARMLESS)
    ]
    if changed:
        raise base.UserError(
            f"{workdir} holds a run with another config:\n" + "\n".join(changed) + "\n"
            "use another --workdir, or the config it began with (these may change: "
            f"{', '.join(HARMLESS).replace('., ', '.*, ')})"
        )
