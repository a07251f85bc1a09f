"""Command line of the benches; `--help` after a suite lists its options."""

import argparse
import importlib
import os
import pathlib
import sys

SUITES = (
    "lossless",
    "rollout",
    "tail",
    "engine",
    "acceptance",
    "drafter",
    "train_step",
    "losses",
    "distill",
)


def main(argv: list[str]) -> int:
    """Run one suite; returns the exit code (1: the suite's own claim failed, 2: bad input)."""
    from fastgrpo_jax import base

    if not argv or argv[0] not in SUITES:
        help_asked = bool({"--help", "-h"} & set(argv))
        usage = "usage: python -m fastgrpo_jax.bench SUITE --out=FILE.json [options]"
        found = f"suite is {argv[0]!r}; " if argv and not help_asked else ""
        print(
            f"{usage}\n\n{found}{'allowed' if found else 'suites'}: {', '.join(SUITES)}; "
            "SUITE --help lists its options",
            file=sys.stdout if help_asked else sys.stderr,
        )
        return 0 if help_asked else 2
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    suite = importlib.import_module(f"fastgrpo_jax.bench.{argv[0]}")
    parser = argparse.ArgumentParser(
        prog=f"python -m fastgrpo_jax.bench {argv[0]}",
        description=suite.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--model", default="tiny", help="tiny, smollm2-135m, a directory, a .gguf")
    parser.add_argument(
        "--weights",
        default="own",
        choices=("own", "random"),
        help="random: only the model's shape is used, drawn from the seed; a config.json will do",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compilation_cache", default="~/.cache/fastgrpo_jax", help="folder; empty: none"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    suite.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    if args.compilation_cache:
        import jax

        folder = os.path.expanduser(args.compilation_cache)
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
        _check(args)
        return suite.run(args)
    except base.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check(args) -> None:
    """Refuse what no suite can use, before any work: numbers, and a result that cannot be kept."""
    from fastgrpo_jax import base

    for name, least in (
        ("seed", 0),
        ("repeats", 1),
        ("warm", 1),
        ("tokens", 1),
        ("group", 1),
        ("prompts", 1),
    ):
        value = getattr(args, name, least)
        if not least <= value < 2**31 - 1:
            raise base.UserError(f"--{name} is {value}; allowed: {least} or more, below 2**31 - 1")
    out = pathlib.Path(args.out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(out.suffix + ".part")
        part.touch()
        part.unlink()
    except OSError as error:
        raise base.UserError(f"--out is {args.out!r}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
