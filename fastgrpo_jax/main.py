"""Train: python -m fastgrpo_jax.main --config=NAME|FILE.py --workdir=DIR [--config.a.b=VALUE ...]

Defaults, then the config, then the command line. Running the same command again resumes.
"""

import os
import shlex
import signal
import sys
import time

USAGE = """usage: python -m fastgrpo_jax.main --config=NAME|FILE.py --workdir=DIR [--config.a.b=VALUE ...]

  --config       a config of the package ({names}) or a Python file with get_config()
  --workdir      where config.json, metrics.jsonl, completions.jsonl, checkpoints/ and report.png go
  --config.a.b   overrides one key, e.g. --config.steps=10 --config.optim.learning_rate=1e-5
  --version      prints the versions of the package, JAX and Python

Every key with its meaning: fastgrpo_jax/configs/default.py. The same command again resumes.
"""


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code (2: bad input, 128 + N: stopped by signal N)."""
    began = time.monotonic()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it announces that torch is missing
    from fastgrpo_jax import base, configs

    if not argv or {"--help", "-h"} & set(argv):
        print(USAGE.format(names=", ".join(configs.names())))
        return 0 if argv else 2
    if "--version" in argv:
        return _version()
    try:
        config, workdir = configs.from_command_line(argv)
        _prepare_jax(config)
        from fastgrpo_jax.train import loop, signals

        try:
            signal.signal(signal.SIGTERM, _interrupt)
            loop.train(config, workdir)
        except (signals.Interrupted, KeyboardInterrupt) as stop:
            name = str(stop) or "SIGINT"
            print(
                f"\nstopped by {name}; the finished steps are saved. To resume:\n"
                f"  python -m fastgrpo_jax.main {shlex.join(argv)}",
                file=sys.stderr,
            )
            return 128 + signal.Signals[name]
        print(f"done in {time.monotonic() - began:.0f} s; files are in {workdir}", file=sys.stderr)
        return 0
    except base.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


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
