"""Export: python -m fastgrpo_jax.export --workdir=DIR --to=hf|eagle --out=DIR

hf: a directory that transformers, vLLM, SGLang and `--config.model.name` load, of a checkpoint's
policy. Adapters of a LoRA run are merged into it, or written for PEFT with --lora=adapter.

eagle: its drafter, of a run with drafter.kind=eagle, under the names of EAGLE-1 and EAGLE-2, which
SGLang and vLLM load; `--config.drafter.init=DIR` takes it too.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys

TARGETS = ("hf", "eagle")
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
        that is there already or cannot be made, and what the run does not have.
    """
    from fastgrpo_jax import base
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
    if args.lora == "adapter" and not c.lora.rank:
        raise base.UserError("--lora is 'adapter', but the run has no adapters (lora.rank is 0)")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise base.UserError(f"--out is {args.out!r}, which is there already and not empty")
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        {"hf": _write_policy, "eagle": _write_drafter}[args.to](args, c, step, part)
        if out.exists():
            out.rmdir()  # empty
        part.rename(out)
    except OSError as error:
        raise base.UserError(f"--out is {args.out!r}: {error.strerror}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def _write_policy(args, c, step: int, out: pathlib.Path) -> None:
    import jax
    import jax.numpy as jnp

    from fastgrpo_jax.models import export as writer
    from fastgrpo_jax.models import load, lora
    from fastgrpo_jax.train import checkpoint

    found = checkpoint.read(args.workdir, step, ("adapters",) if c.lora.rank else ("params",))
    model = load.load(c.model.name, "float32", c.seed)
    params = found.get("params")
    if c.lora.rank:
        targets = tuple(name.strip() for name in c.lora.targets.split(","))
        settings = lora.LoraConfig(c.lora.rank, c.lora.alpha, targets)
        if args.lora == "adapter":
            writer.save_adapter(out, settings, found["adapters"], c.model.name)
            return
        params = lora.merge(settings, *jax.tree.map(jnp.asarray, (model.params, found["adapters"])))
    writer.save(
        out,
        model.config,
        _cast(params, args.dtype),
        model.tokenizer,
        model.stop_tokens,
        *load.source_files(c.model.name),
        int(args.shard_bytes),
    )


def _write_drafter(args, c, step: int, out: pathlib.Path) -> None:
    from fastgrpo_jax.models import eagle, eagle_file, eagle_hf, load
    from fastgrpo_jax.train import checkpoint

    d = c.drafter
    model = load.load(c.model.name, "float32", c.seed)
    shape = None
    if d.kind != "none":
        shape = eagle.config_for(model.config, d.kind, d.features)
        if d.init:
            shape, _, _ = eagle_file.load(d.init, model.config)
    eagle_hf.check_exportable(shape)
    wanted = ("drafter",) if c.lora.rank else ("drafter", "params")
    found = checkpoint.read(args.workdir, step, wanted)
    embed = found.get("params", model.params)["embed"]
    drafter, embed = _cast((found["drafter"], embed), args.dtype)
    eagle_hf.save(out, shape, drafter, model.config, embed)


def _cast(params, dtype: str):
    import jax
    import jax.numpy as jnp
    import numpy as np

    return jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(dtype)), params)


def _config(workdir: pathlib.Path):
    """Read the config that a run has left; keys that it did not know have their defaults."""
    from fastgrpo_jax import base
    from fastgrpo_jax.configs import default

    path = workdir / "config.json"
    try:
        found = json.loads(path.read_text())
        c = default.get_config()
        with c.ignore_type():
            c.update(found)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        text = f"--workdir is {str(workdir)!r}, but {path} is no config: {error}"
        raise base.UserError(text) from error
    return c


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
