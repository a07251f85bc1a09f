"""Command line of the benches; `--help` after a suite lists its options."""

import argparse
import importlib
import os
import sys

SUITES = ("lossless", "rollout")


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    suite.add_arguments(parser)
    try:
        return suite.run(parser.parse_args(argv[1:]))
    except base.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
