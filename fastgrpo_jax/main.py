"""Train: python -m fastgrpo_jax.main --config=NAME|FILE.py --workdir=DIR [--config.a.b=VALUE ...]

Defaults, then the config, then the command line. Running the same command again resumes.
"""

import os
import shlex
import signal
import sys
import time
import traceback

from fastgrpo_jax import supervise

USAGE = """usage: python -m fastgrpo_jax.main --config=NAME|FILE.py --workdir=DIR [--config.a.b=VALUE ...]

  --config       a config of the package ({names}) or a Python file with get_config()
  --workdir      where config.json, metrics.jsonl, completions.jsonl, checkpoints/ and report.png go
  --config.a.b   overrides one key, e.g. --config.steps=10 --config.optim.learning_rate=1e-5
  --version      prints the versions of the package, JAX and Python

Every key with its meaning: fastgrpo_jax/configs/default.py. The same command again resumes.
"""


# What the runtime says when another process does not answer; its errors are of several types.
_LOSS = ("UNKNOWN:", "INTERNAL:", "UNAVAILABLE:", "ABORTED:", "CANCELLED:", "DEADLINE_EXCEEDED:")


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code: 2 for bad input, 128 + N when stopped by signal
    N, `supervise.LOST` when one of several processes was lost."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it announces that torch is missing
    from fastgrpo_jax import base, configs, hosts

    if not argv or {"--help", "-h"} & set(argv):
        print(USAGE.format(names=", ".join(configs.names())))
        return 0 if argv else 2
    if "--version" in argv:
        return _version()
    try:
        config, workdir = configs.from_command_line(argv)
        where = hosts.address(config.hosts.coordinator, config.hosts.count, config.hosts.index)
    except base.UserError as error:
        return _refuse(error)
    if where is None:
        return _train(config, workdir, argv)
    if not supervise.supervised():
        command = [sys.executable, "-m", "fastgrpo_jax.main", *argv]
        return supervise.supervise(command, str(where), config.hosts.timeout_s)
    supervise.follow()
    code = 1
    try:
        code = _train(config, workdir, argv, where)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        if first_line.startswith(_LOSS):  # a collective whose other end is gone
            code = supervise.LOST
            print(f"error: {first_line[:300]}", file=sys.stderr)
        else:
            traceback.print_exc()
    supervise.leave(code)


def _train(config, workdir: str, argv: list[str], where=None) -> int:
    began = time.monotonic()
    from fastgrpo_jax import base, hosts

    try:
        _prepare_jax(config)
        hosts.join(where, config.hosts.timeout_s)
        from fastgrpo_jax.train import loop, metrics, signals

        signal.signal(signal.SIGTERM, _interrupt)
        loop.train(config, workdir)
        metrics.say(f"done in {time.monotonic() - began:.0f} s; files are in {workdir}")
        return 0
    except base.UserError as error:
        return _refuse(error)
    except KeyboardInterrupt as stop:
        return _stopped(str(stop), argv)
    except signals.Interrupted as stop:
        return _stopped(str(stop), argv)


def _refuse(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


def _stopped(name: str, argv: list[str]) -> int:
    name = name or "SIGINT"
    print(
        f"\nstopped by {name}; the finished steps are saved. To resume:\n"
        f"  python -m fastgrpo_jax.main {shlex.join(argv)}",
        file=sys.stderr,
    )
    return 128 + signal.Signals[name]


def _interrupt(number, frame):
    """End a start by SIGTERM as Ctrl-C would; once training runs, the loop sees to signals."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _prepare_jax(config) -> None:
    """Set what JAX must know before its first use."""
    import jax

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if config.compilation_cache:
        folder = os.path.expanduser(config.compilation_cache)
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _version() -> int:
    import jax

    import fastgrpo_jax

    print(
        f"fastgrpo_jax {fastgrpo_jax.__version__}, jax {jax.__version__}, "
        f"Python {sys.version.split()[0]}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
