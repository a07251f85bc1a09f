"""Train a drafter on its policy's own rollouts, to bench with and to start runs from.

Rollouts of a task are made once by plain decoding, at each of some temperatures, and read
several times. The file that --save names is what `bench rollout --drafter=FILE` and
`--config.drafter.init=FILE` take.
"""

import os
import time

import jax
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.bench import common
from fastgrpo_jax.models import eagle, eagle_file, load
from fastgrpo_jax.rollout import buckets, decode, draft_vocab, generate
from fastgrpo_jax.train import distill, drafter, optim


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--save", required=True, help="FILE.safetensors to write")
    parser.add_argument("--kind", default="fastgrpo", choices=eagle.KINDS)
    parser.add_argument(
        "--tasks", default="arithmetic", help="arithmetic, addition or FILE.jsonl, comma-separated"
    )
    parser.add_argument("--temperatures", default="0.7,1.0", help="comma-separated")
    parser.add_argument("--prompts", type=int, default=64, help="of each task and temperature")
    parser.add_argument("--tokens", type=int, default=64, help="response tokens, at most")
    parser.add_argument(
        "--max_prompt", type=int, default=96, help="tokens; longer ones are skipped"
    )
    parser.add_argument("--steps", type=int, default=400, help="updates, on 8 rollouts each")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="falls to 0 by a cosine")
    parser.add_argument("--feature_weight", type=float, default=0.2)
    parser.add_argument("--token_weight", type=float, default=1.0)
    parser.add_argument("--token_loss", default="ce", choices=distill.TOKEN_LOSSES)
    parser.add_argument("--unroll", type=int, default=3, help="steps of the training-time test")
    parser.add_argument("--vocab", type=int, default=8192, help="draft vocabulary; 0: all ids")
    parser.add_argument("--held", type=float, default=0.1, help="share of prompts to examine by")
    parser.add_argument("--rollouts", default="", help="FILE.npz to keep the rollouts in")


GROUP = 8
EXAMINE = 50  # updates between looks at the held prompts


def run(args) -> int:
    """Run the suite."""
    if args.quick:
        args.prompts, args.tokens, args.steps = 2, 16, min(args.steps, 8)
    if args.steps < 1 or args.prompts < 1 or args.tokens < 1:
        raise base.UserError("--steps, --prompts and --tokens must be 1 or more")
    if not 0 <= args.held < 1:
        raise base.UserError(f"--held is {args.held}; allowed: 0 or more, below 1")
    weights = distill.DistillConfig(
        args.feature_weight, args.token_weight, args.token_loss, args.unroll
    )
    rates = optim.OptimConfig(
        args.learning_rate, warmup_steps=min(20, args.steps // 2), decay_steps=args.steps
    )
    model = load.load(args.model, "float32", args.seed)
    batches = _batches(args, model)
    order = np.random.Generator(np.random.Philox(args.seed)).permutation(len(batches))
    batches = [batches[i] for i in order]
    counts = draft_vocab.count(row for batch in batches for row in base.responses(batch))
    ids = None
    if 0 < args.vocab < model.config.vocab:
        ids = draft_vocab.rank(counts, args.vocab, model.config.vocab, model.stop_tokens)
    known = common.read_lessons(model, args.kind, batches, GROUP, rates, weights, ids)
    held = known.lessons[: round(args.held * len(batches))]
    taught = known._replace(lessons=known.lessons[len(held) :])
    rows, began = [], time.perf_counter()

    def heard(step: int, loss: float, params: base.Params) -> None:
        row = {"step": step, "loss": round(loss, 4)}
        if held and (step % EXAMINE == 0 or step == args.steps):
            seen = [drafter.examine(known.config, known.frozen, params, x) for x in held]
            row |= {
                f"acceptance_{i + 1}": round(float(x), 4)
                for i, x in enumerate(np.mean(seen, axis=0))
            }
        row["seconds"] = round(time.perf_counter() - began, 1)
        rows.append(row)
        common.say("  ".join(f"{k} {v}" for k, v in row.items()))

    config, params, loss = common.train_drafter(taught, args.steps, args.seed, heard)
    eagle_file.save(args.save, config, jax.device_get(params), counts)
    summary = {"loss": round(loss, 4), "rollouts": len(batches) * GROUP, "file": args.save}
    summary |= {k: v for k, v in rows[-1].items() if k.startswith("acceptance")}
    common.write(args.out, "drafter", args, model, rows, summary)
    return 0


def _batches(args, model) -> list[base.RolloutBatch]:
    """Make the rollouts, or read those that an earlier run kept."""
    if args.rollouts and os.path.exists(args.rollouts):
        with np.load(args.rollouts) as file:
            whole = base.RolloutBatch(*(file[name] for name in base.RolloutBatch._fields))
        return common.groups(whole, GROUP)
    batches = []
    for task in args.tasks.split(","):
        for temperature in _temperatures(args.temperatures):
            batches += _rollouts(args, model, task, temperature)
    if args.rollouts:
        np.savez(args.rollouts, **_joined(batches)._asdict())
    return batches


def _joined(batches: list[base.RolloutBatch]) -> base.RolloutBatch:
    """Put groups of unlike lengths into one batch."""
    longest = max(b.tokens.shape[1] for b in batches)

    def wide(x):
        x = np.asarray(x)
        return np.pad(x, [(0, 0), (0, longest - x.shape[1])]) if x.ndim == 2 else x

    return base.RolloutBatch(*(np.concatenate([wide(x) for x in xs]) for xs in zip(*batches)))


def _temperatures(text: str) -> list[float]:
    try:
        found = [float(x) for x in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= x < float("inf") for x in found):
        raise base.UserError(f"--temperatures is {text!r}; allowed: 0.7,1.0 and the like")
    return found


def _rollouts(args, model, name: str, temperature: float) -> list[base.RolloutBatch]:
    """Answer prompts of a task, up to eight at a time, eight answers each."""
    at_once = min(8, args.prompts)
    prompts = common.chat_prompts(
        model, common.open_task(name, args.seed + 1), args.prompts, args.max_prompt
    )
    limits = generate.Limits(args.max_prompt, args.tokens, args.max_prompt + args.tokens)
    engine = common.engine_for(
        decode.Spec(model.config, None, GROUP),
        buckets.row_ladder(at_once * GROUP),
        limits,
        model.stop_tokens,
        [common.plain()],
        64,
    )
    weights = decode.Weights(jax.tree.map(jax.numpy.asarray, model.params))
    found = []
    for at in range(0, len(prompts) - at_once + 1, at_once):
        some = prompts[at : at + at_once]
        request = generate.Request(some, tuple(range(at, at + at_once)), args.seed + 1, 0)
        done = generate.rollout(
            engine, weights, request, generate.Settings(temperature), limits, common.plain()
        )
        found += common.groups(done.batch, GROUP)
        common.say(f"{name} at T {temperature}: {len(found)} of {len(prompts)} prompts answered")
    return found
