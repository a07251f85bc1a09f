"""What drafters learn from in the benches: a policy's own rollouts of tasks, read by it once."""

import dataclasses
import itertools
import json
import os
import zipfile
from typing import NamedTuple

import jax
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.bench import common
from fastgrpo_jax.models import load
from fastgrpo_jax.rollout import buckets, draft_vocab, generate, inputs, speculate
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.train import distill, drafter, optim


def add_arguments(parser) -> None:
    """Add the options of what a drafter learns from, and of its shape."""
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
        "--lesson", type=int, default=32, help="rollouts of a lesson, of unlike prompts"
    )
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
AT_ONCE = 64  # rows that are decoded together


class Material(NamedTuple):
    """Lessons that the policy has read.

    known: those to learn; held: those of other prompts, to examine by.
    counts: how often the former say each id, which ranks a draft vocabulary.
    rollouts: of both.
    """

    known: common.Lessons
    held: list[drafter.Lesson]
    counts: dict[str, int]
    rollouts: int

    def examine(self, params: base.Params, lessons=None, unroll: int = 0) -> np.ndarray:
        """Average the acceptance of some lessons, or the held ones, at each unrolled step."""
        config = self.known.config
        if unroll:
            further = dataclasses.replace(config.distill, unroll=unroll)
            config = config._replace(distill=further)
        lessons = self.held if lessons is None else lessons
        seen = [drafter.examine(config, self.known.frozen, params, x) for x in lessons]
        return np.mean(seen, axis=0)


def check(args) -> None:
    """Refuse options that nothing can be made of; under --quick they are made small first."""
    if args.quick:
        args.prompts, args.tokens = min(args.prompts, 8), min(args.tokens, 16)
        args.lesson = min(args.lesson, 4)
    for name in ("prompts", "tokens", "group", "lesson"):
        if getattr(args, name) < 1:
            raise base.UserError(f"--{name} is {getattr(args, name)}; allowed: 1 or more")
    if args.lesson % args.group:
        raise base.UserError(
            f"--lesson is {args.lesson}; allowed: multiples of --group, which is {args.group}"
        )
    if not 0 <= args.held < 1:
        raise base.UserError(f"--held is {args.held}; allowed: 0 or more, below 1")
    if args.vocab < 0:
        raise base.UserError(f"--vocab is {args.vocab}; allowed: 0 (all ids) or more")


def prepare(
    args, model: load.LoadedModel, rates: optim.OptimConfig, weights: distill.DistillConfig
) -> Material:
    """Make the rollouts, or take those kept, and let the policy read them."""
    rollouts = _rollouts(args, model)
    held, taught = _cut(rollouts, args)
    if not taught:
        raise base.UserError(
            f"--prompts is {args.prompts}: too few for a lesson of {args.lesson} rollouts"
        )
    counts = draft_vocab.count(row for batch in taught for row in base.responses(batch))
    ids = None
    if 0 < args.vocab < model.config.vocab:
        ids = draft_vocab.rank(counts, args.vocab, model.config.vocab, model.stop_tokens)
    shape = common.shape_of(args, model.config)
    common.say(f"the policy reads {len(held + taught)} lessons of {args.lesson} rollouts")
    known = common.read_lessons(model, shape, held + taught, args.group, rates, weights, ids)
    held, known = known.lessons[: len(held)], known._replace(lessons=known.lessons[len(held) :])
    return Material(known, held, counts, len(rollouts.length))


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
        _lessons(rollouts, rng.permutation(np.concatenate(some or [[]]).astype(int)), args)
        for some in (order[:count], order[count:])
    )


def _lessons(rollouts, starts, args) -> list[base.RolloutBatch]:
    per = args.lesson // args.group
    rows = starts[: len(starts) // per * per, None] + np.arange(args.group)
    rows = rows.reshape(-1, args.lesson)
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
        request = inputs.Request(some, tuple(range(at, at + at_once)), args.seed + 1, 0)
        done = generate.rollout(
            engine, weights, request, inputs.Settings(temperature), limits, common.plain()
        )
        found.append(base.RolloutBatch(*(np.asarray(x) for x in done.batch)))
        common.say(f"{name} at T {temperature}: {at + at_once} of {len(prompts)} prompts answered")
    return found
