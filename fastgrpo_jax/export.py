"""Export: python -m fastgrpo_jax.export --workdir=DIR --to=hf --out=DIR

hf: a directory that transformers, vLLM, SGLang and `--config.model.name` load, of a checkpoint's
policy. Adapters of a LoRA run are merged into it, or written for PEFT with --lora=adapter.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys

TARGETS = ("hf",)
DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code: 2 for bad input."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # arrays are only read and written
    parser = argparse.ArgumentParser(
        prog="python -m fastgrpo_jax.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workdir", required=True, help="of a run")
    parser.add_argument("--out", required=True, help="directory to make")
    parser.add_argument("--to", default="hf", choices=TARGETS)
    parser.add_argument("--step", type=int, default=-1, help="of the checkpoint; default: the last")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the weights")
    parser.add_argument(
        "--lora", default="merged", choices=("merged", "adapter"), help="what a LoRA run gives"
    )
    parser.add_argument("--shard_bytes", type=float, default=5e9, help="of a file, at most")
    args = parser.parse_args(argv)
    from fastgrpo_jax import base

    try:
        print(f"written: {export(args)}", file=sys.stderr)
        return 0
    except base.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def export(args) -> pathlib.Path:
    """Write what the options ask for, whole or not at all.

    Raises:
      UserError: for a workdir without a config or checkpoint, a step that was not kept, an --out
        that is there already or cannot be made.
    """
    import jax
    import jax.numpy as jnp

    from fastgrpo_jax import base
    from fastgrpo_jax.models import export as writer
    from fastgrpo_jax.models import load, lora
    from fastgrpo_jax.train import checkpoint

    workdir, out = pathlib.Path(args.workdir), pathlib.Path(args.out)
    c = _config(workdir)
    kept = checkpoint.steps(workdir)
    step = args.step if args.step >= 0 else max(kept, default=-1)
    if step not in kept:
        raise base.UserError(
            f"--step is {args.step}; {workdir} has checkpoints of "
            f"{', '.join(map(str, kept)) or 'no step'}"
        )
    if not args.shard_bytes >= 1:
        raise base.UserError(f"--shard_bytes is {args.shard_bytes:g}; allowed: 1 or more")
    rank = c["lora"]["rank"]
    if args.lora == "adapter" and not rank:
        raise base.UserError("--lora is 'adapter', but the run has no adapters (lora.rank is 0)")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise base.UserError(f"--out is {args.out!r}, which is there already and not empty")
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
    except OSError as error:
        raise base.UserError(f"--out is {args.out!r}: {error.strerror}") from error
    model = load.load(c["model"]["name"], "float32", c["seed"])
    found = checkpoint.read(workdir, step, ("adapters",) if rank else ("params",))
    if rank:
        targets = tuple(name.strip() for name in c["lora"]["targets"].split(","))
        settings = lora.LoraConfig(rank, c["lora"]["alpha"], targets)
        if args.lora == "adapter":
            writer.save_adapter(part, settings, found["adapters"], c["model"]["name"])
            return _finish(part, out)
        params = lora.merge(settings, *jax.tree.map(jnp.asarray, (model.params, found["adapters"])))
    else:
        params = found["params"]
    params = jax.tree.map(lambda x: jax.device_get(x).astype(jnp.dtype(args.dtype)), params)
    source, generation = load.source_files(c["model"]["name"])
    writer.save(
        part,
        model.config,
        params,
        model.tokenizer,
        model.stop_tokens,
        source,
        generation,
        int(args.shard_bytes),
    )
    return _finish(part, out)


def _finish(part: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    if out.exists():
        out.rmdir()  # empty
    part.rename(out)
    return out


def _config(workdir: pathlib.Path) -> dict:
    """Read the config that a run has left."""
    from fastgrpo_jax import base

    path = workdir / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise base.UserError(
            f"--workdir is {str(workdir)!r}, but {path} is no config: {error}"
        ) from error
    if not isinstance(found, dict) or not {"model", "lora", "seed"} <= found.keys():
        raise base.UserError(f"{path} is no config of a run")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
