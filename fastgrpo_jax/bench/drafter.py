"""Train a drafter on its policy's own rollouts, to bench with and to start runs from.

Rollouts of a task are made once by plain decoding, at each of some temperatures, and read
several times. What it learned by heart is seen in `taught_i`, the same as `acceptance_i` for
prompts that it was trained on: where they lie apart, more rollouts help, not more updates. A
lesson of many rollouts costs little more than one of few, since Muon's own work is the most of an
update of a small drafter. The file that --save names is what `bench rollout --drafter=FILE` and
`--config.drafter.init=FILE` take.
"""

import os
import time

import jax

from fastgrpo_jax import base
from fastgrpo_jax.bench import common, lessons
from fastgrpo_jax.models import eagle_file
from fastgrpo_jax.train import distill, optim


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--save", required=True, help="FILE.safetensors to write")
    lessons.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=400, help="updates, one lesson each")
    parser.add_argument("--optimizer", default="muon", choices=optim.OPTIMIZERS)
    parser.add_argument(
        "--learning_rate", type=float, default=0.02, help="falls to 0 by a cosine; adamw: 3e-3"
    )
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--feature_weight", type=float, default=0.2)
    parser.add_argument("--token_weight", type=float, default=1.0)
    parser.add_argument("--token_loss", default="ce", choices=distill.TOKEN_LOSSES)
    parser.add_argument("--unroll", type=int, default=1, help="steps of the training-time test")


EXAMINE = 50  # updates between looks at the held prompts


def run(args) -> int:
    """Run the suite."""
    args.steps = min(args.steps, 8) if args.quick else args.steps
    lessons.check(args)
    if args.steps < 1:
        raise base.UserError(f"--steps is {args.steps}; allowed: 1 or more")
    if os.path.isdir(args.save):
        raise base.UserError(f"--save is {args.save!r}, a folder; allowed: FILE.safetensors")
    try:
        weights = distill.DistillConfig(
            args.feature_weight, args.token_weight, args.token_loss, args.unroll
        )
        rates = optim.OptimConfig(
            optimizer=args.optimizer,
            learning_rate=args.learning_rate,
            schedule="cosine",
            warmup_steps=min(20, args.steps // 2),
            decay_steps=args.steps,
            weight_decay=args.weight_decay,
        )
    except base.UserError as error:  # which names the keys of a run's config
        text = str(error).replace("drafter.", "--").replace("optim.", "--")
        raise base.UserError(text) from error
    model = common.load(args, "float32")
    material = lessons.prepare(args, model, rates, weights)
    known, held = material.known, material.held
    rows, began = [], time.perf_counter()

    def examined(name: str, params: base.Params, some) -> dict[str, float]:
        found = material.examine(params, some)
        return {f"{name}_{i + 1}": round(float(x), 4) for i, x in enumerate(found)}

    def heard(step: int, loss: float, params: base.Params) -> None:
        row = {"step": step, "loss": round(loss, 4)}
        if held and (step % EXAMINE == 0 or step == args.steps):
            row |= examined("acceptance", params, held)
            row |= examined("taught", params, known.lessons[: len(held)])
        row["seconds"] = round(time.perf_counter() - began, 1)
        rows.append(row)
        common.say("  ".join(f"{k} {v}" for k, v in row.items()))

    config, params, loss = common.train_drafter(known, args.steps, args.seed, heard)
    eagle_file.save(args.save, config, jax.device_get(params), material.counts)
    summary = {"loss": round(loss, 4), "rollouts": material.rollouts, "file": args.save}
    summary |= {k: v for k, v in rows[-1].items() if k.startswith(("acceptance", "taught"))}
    common.write(args.out, "drafter", args, model, rows, summary)
    return 0
