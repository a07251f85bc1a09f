"""Run configurations; `default.py` holds every key with its unit and reason.

This module reads them: defaults, then a config by name or file, then the command line. A key
that `default.py` does not have is refused with the nearest one that it has.
"""

import difflib
import importlib
import importlib.util
import pathlib
from typing import Any

from ml_collections import config_dict

from fastgrpo_jax import base
from fastgrpo_jax.configs import default


def names() -> list[str]:
    """List the configs of the package."""
    return sorted(p.stem for p in pathlib.Path(__file__).parent.glob("[a-z]*.py"))


def load(name: str) -> config_dict.ConfigDict:
    """Load a config of the package by name, or a Python file with `get_config()`.

    Raises:
      UserError: unknown name, a file without get_config, unknown keys.
    """
    if name.endswith(".py"):
        config = _from_file(pathlib.Path(name))
    elif name in names():
        config = importlib.import_module(f"{__name__}.{name}").get_config()
    else:
        raise base.UserError(
            f"--config is {name!r}{_hint(name, names())}; allowed: {', '.join(names())}, or a "
            "path that ends in .py"
        )
    if not isinstance(config, config_dict.ConfigDict):
        raise base.UserError(
            f"config {name}: get_config() gives {type(config).__name__}; allowed: a ConfigDict, "
            "as fastgrpo_jax.configs.default.get_config() makes it"
        )
    allowed = _paths(default.get_config())
    for path, value in _paths(config).items():
        if path not in allowed:
            raise base.UserError(f"config {name}: {_unknown(path, allowed)}")
        _set(config, path, _convert(path, value, allowed[path]))
    missing = sorted(set(allowed) - set(_paths(config)))
    if missing:
        raise base.UserError(
            f"config {name} lacks {', '.join(missing)}; start from default.get_config()"
        )
    return config


def override(config: config_dict.ConfigDict, path: str, text: str) -> None:
    """Set one key from the command line; the text is read as the default's type.

    Raises:
      UserError: unknown key, or a text that is not of its type.
    """
    allowed = _paths(config)
    if path not in allowed:
        raise base.UserError(f"--config.{path}: {_unknown(path, allowed)}")
    _set(config, path, _convert(path, text, allowed[path]))


def from_command_line(argv: list[str]) -> tuple[config_dict.ConfigDict, str]:
    """Read --config, --workdir and --config.a.b=VALUE, each with = or as two words.

    Raises:
      UserError: for anything else.
    """
    found: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in ("--config", "--workdir") and not flag.startswith("--config."):
            raise base.UserError(
                f"unknown argument {word!r}; allowed: --config, --workdir, --config.a.b=VALUE"
            )
        if not equals:
            if not words:
                raise base.UserError(f"{flag} needs a value, e.g. {flag}=VALUE")
            value = words.pop(0)
        found[flag] = value
    for flag in ("--config", "--workdir"):
        if not found.get(flag):
            raise base.UserError(f"{flag} is missing; see --help")
    config = load(found.pop("--config"))
    workdir = found.pop("--workdir")
    for flag, value in found.items():
        override(config, flag.removeprefix("--config."), value)
    return config, workdir


def _from_file(path: pathlib.Path) -> Any:
    if not path.is_file():
        raise base.UserError(f"--config is {str(path)!r}: there is no such file")
    spec = importlib.util.spec_from_file_location("fastgrpo_user_config", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.get_config()
    except base.UserError:
        raise
    except Exception as error:
        raise base.UserError(
            f"config {path} failed: {type(error).__name__}: {error}; it must define get_config(), "
            "which starts from fastgrpo_jax.configs.default.get_config()"
        ) from error


def _paths(config: config_dict.ConfigDict, prefix: str = "") -> dict[str, Any]:
    out = {}
    for key, value in config.items():
        if isinstance(value, config_dict.ConfigDict):
            out |= _paths(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def _set(config: config_dict.ConfigDict, path: str, value: Any) -> None:
    *folders, leaf = path.split(".")
    for folder in folders:
        config = config[folder]
    with config.ignore_type():  # the file's own type may be another: 7.0 where 7 is meant
        config[leaf] = value


def _convert(path: str, value: Any, like: Any) -> Any:
    """Read a value as the type of the default; "false" is False, 3 is a float where one is due."""
    kind = type(like)
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        if isinstance(value, bool) and kind is not str:
            raise ValueError
        if kind is int and not isinstance(value, str) and int(value) != value:
            raise ValueError
        return kind(value)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        allowed = "true or false" if kind is bool else f"a value of type {kind.__name__}"
        raise base.UserError(f"{path} is {value!r}; allowed: {allowed}") from error


def _hint(name: str, choices) -> str:
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""


def _unknown(path: str, allowed: dict[str, Any]) -> str:
    inside = [p for p in allowed if p.startswith(path + ".")]
    if inside:
        return f"{path} is a group of keys, such as {inside[0]}"
    leaf = path.rpartition(".")[2]
    same_leaf = [p for p in allowed if p.rpartition(".")[2] == leaf]
    hint = f" (did you mean {same_leaf[0]}?)" if same_leaf else _hint(path, allowed)
    return f"there is no key {path}{hint or '; all keys are in fastgrpo_jax/configs/default.py'}"
