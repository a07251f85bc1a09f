"""Train a drafter on its policy's own rollouts, to bench with and to start runs from.

Rollouts of a task are made once by plain decoding, at each of some temperatures, and read
several times. The file that --save names is what `bench rollout --drafter=FILE` and
`--config.drafter.init=FILE` take.
"""

import itertools
import json
import os
import time
import zipfile

import jax
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.bench import common
from fastgrpo_jax.models import eagle_file
from fastgrpo_jax.rollout import buckets, draft_vocab, generate, speculate
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.train import distill, drafter, optim


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--save", required=True, help="FILE.safetensors to write")
    common.add_drafter(parser)
    parser.add_argument(
        "--tasks", default="arithmetic", help="arithmetic, addition or FILE.jsonl, comma-separated"
    )
    parser.add_argument("--temperatures", default="0.7,1.0", help="comma-separated")
    parser.add_argument("--prompts", type=int, default=256, help="of each task and temperature")
    parser.add_argument("--group", type=int, default=2, help="answers of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="response tokens, at most")
    parser.add_argument(
        "--max_prompt", type=int, default=96, help="tokens; longer ones are skipped"
    )
    parser.add_argument(
        "--steps", type=int, default=800, help="updates, on 8 rollouts each, of unlike prompts"
    )
    parser.add_argument("--optimizer", default="muon", choices=optim.OPTIMIZERS)
    parser.add_argument(
        "--learning_rate", type=float, default=0.02, help="falls to 0 by a cosine; adamw: 3e-3"
    )
    parser.add_argument("--feature_weight", type=float, default=0.2)
    parser.add_argument("--token_weight", type=float, default=1.0)
    parser.add_argument("--token_loss", default="ce", choices=distill.TOKEN_LOSSES)
    parser.add_argument("--unroll", type=int, default=1, help="steps of the training-time test")
    parser.add_argument("--vocab", type=int, default=8192, help="draft vocabulary; 0: all ids")
    parser.add_argument("--held", type=float, default=0.1, help="share of prompts to examine by")
    parser.add_argument("--rollouts", default="", help="FILE.npz to keep the rollouts in")


# What rollouts depend on; a file of them is used again for the same alone.
MADE_BY = (
    "model",
    "weights",
    "seed",
    "tasks",
    "temperatures",
    "prompts",
    "group",
    "tokens",
    "max_prompt",
)
LESSON = 8  # rollouts of an update
AT_ONCE = 64  # rows that are decoded together
EXAMINE = 50  # updates between looks at the held prompts


def run(args) -> int:
    """Run the suite."""
    if args.quick:
        args.prompts, args.tokens = min(args.prompts, 8), min(args.tokens, 16)
        args.steps = min(args.steps, 8)
    for name in ("steps", "prompts", "tokens", "group"):
        if getattr(args, name) < 1:
            raise base.UserError(f"--{name} is {getattr(args, name)}; allowed: 1 or more")
    if LESSON % args.group:
        raise base.UserError(f"--group is {args.group}; allowed: divisors of {LESSON}")
    if not 0 <= args.held < 1:
        raise base.UserError(f"--held is {args.held}; allowed: 0 or more, below 1")
    if args.vocab < 0:
        raise base.UserError(f"--vocab is {args.vocab}; allowed: 0 (all ids) or more")
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
        )
    except base.UserError as error:  # which names the keys of a run's config
        text = str(error).replace("drafter.", "--").replace("optim.", "--")
        raise base.UserError(text) from error
    model = common.load(args, "float32")
    rollouts = _rollouts(args, model)
    held, taught = _cut(rollouts, args)
    if not taught:
        raise base.UserError(
            f"--prompts is {args.prompts}: too few for a lesson of {LESSON} rollouts"
        )
    counts = draft_vocab.count(row for batch in taught for row in base.responses(batch))
    ids = None
    if 0 < args.vocab < model.config.vocab:
        ids = draft_vocab.rank(counts, args.vocab, model.config.vocab, model.stop_tokens)
    shape = common.shape_of(args, model.config)
    common.say(f"the policy reads {len(held + taught)} lessons of {LESSON} rollouts")
    known = common.read_lessons(model, shape, held + taught, args.group, rates, weights, ids)
    held, known = known.lessons[: len(held)], known._replace(lessons=known.lessons[len(held) :])
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

    config, params, loss = common.train_drafter(known, args.steps, args.seed, heard)
    eagle_file.save(args.save, config, jax.device_get(params), counts)
    summary = {"loss": round(loss, 4), "rollouts": len(rollouts.length), "file": args.save}
    summary |= {k: v for k, v in rows[-1].items() if k.startswith("acceptance")}
    common.write(args.out, "drafter", args, model, rows, summary)
    return 0


def _rollouts(args, model) -> base.RolloutBatch:
    """Make the rollouts, or read those that an earlier run kept."""
    about = {name: getattr(args, name) for name in MADE_BY}
    if args.rollouts and os.path.exists(args.rollouts):
        return _kept(args.rollouts, about)
    if args.rollouts and not os.path.isdir(os.path.dirname(args.rollouts) or "."):
        raise base.UserError(f"--rollouts is {args.rollouts!r}: there is no such folder")
    made = [
        _answers(args, model, task, temperature)
        for task in args.tasks.split(",")
        for temperature in _temperatures(args.temperatures)
    ]
    whole = base.RolloutBatch(*(np.concatenate(x) for x in zip(*itertools.chain(*made))))
    if args.rollouts:
        with open(args.rollouts, "wb") as file:  # by name, savez would add .npz
            np.savez(file, about=json.dumps(about), **whole._asdict())
    return whole


def _kept(path: str, about: dict) -> base.RolloutBatch:
    """Read the rollouts of an earlier run, which must have been made alike."""
    try:
        with np.load(path) as file:
            before = json.loads(str(file["about"]))
            batch = base.RolloutBatch(*(file[name] for name in base.RolloutBatch._fields))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise base.UserError(
            f"--rollouts is {path!r}, which holds no rollouts ({error}); remove it"
        ) from error
    differ = [f"--{k} {before.get(k)!r} for {v!r}" for k, v in about.items() if before.get(k) != v]
    if differ:
        raise base.UserError(
            f"--rollouts is {path!r}, whose rollouts were made with {', '.join(differ)}; "
            "use another file, or those options"
        )
    common.say(f"read {len(batch.length)} rollouts from {path}")
    return batch


def _cut(rollouts: base.RolloutBatch, args) -> tuple[list, list]:
    """Cut rollouts into lessons of unlike prompts; returns those to examine by, and the others.

    All answers of a prompt, at any temperature, are on the same side.
    """
    groups = len(rollouts.length) // args.group
    first = np.arange(groups) * args.group
    prompts: dict[bytes, list[int]] = {}
    for i in first:
        prompt = rollouts.tokens[i, : rollouts.prompt_length[i]]
        prompts.setdefault(prompt.tobytes(), []).append(i)
    rng = np.random.Generator(np.random.Philox(args.seed))
    order = [list(prompts.values())[i] for i in rng.permutation(len(prompts))]
    count = round(args.held * len(order))
    return tuple(
        _lessons(rollouts, rng.permutation(np.concatenate(some or [[]]).astype(int)), args.group)
        for some in (order[:count], order[count:])
    )


def _lessons(rollouts, starts, group: int) -> list[base.RolloutBatch]:
    per = LESSON // group
    rows = (starts[:, None] + np.arange(group))[: len(starts) // per * per].reshape(-1, LESSON)
    return [base.RolloutBatch(*(x[some] for x in rollouts)) for some in rows]


def _temperatures(text: str) -> list[float]:
    try:
        found = [float(x) for x in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= x < float("inf") for x in found):
        raise base.UserError(f"--temperatures is {text!r}; allowed: 0.7,1.0 and the like")
    return found


def _answers(args, model, name: str, temperature: float) -> list[base.RolloutBatch]:
    """Answer prompts of a task by plain decoding."""
    at_once = min(AT_ONCE // args.group, args.prompts)
    prompts = common.chat_prompts(
        model, common.open_task(name, args.seed + 1), args.prompts, args.max_prompt
    )
    limits = engine_lib.Limits(args.max_prompt, args.tokens, args.max_prompt + args.tokens)
    engine = common.engine_for(
        speculate.Spec(model.config, None, args.group),
        buckets.row_ladder(at_once * args.group),
        limits,
        model.stop_tokens,
        [common.plain()],
        64,
    )
    weights = speculate.Weights(jax.tree.map(jax.numpy.asarray, model.params))
    found = []
    for at in range(0, len(prompts) - at_once + 1, at_once):
        some = prompts[at : at + at_once]
        request = generate.Request(some, tuple(range(at, at + at_once)), args.seed + 1, 0)
        done = generate.rollout(
            engine, weights, request, generate.Settings(temperature), limits, common.plain()
        )
        found.append(base.RolloutBatch(*(np.asarray(x) for x in done.batch)))
        common.say(f"{name} at T {temperature}: {at + at_once} of {len(prompts)} prompts answered")
    return found
