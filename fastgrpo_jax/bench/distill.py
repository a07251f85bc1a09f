"""Which loss, and how many unrolled steps, teach a drafter most in the same time?

Drafters are trained on the same lessons for the same number of seconds, each with one combination
of the options that take lists. An update of each is timed first, in turn, so that a noisy machine
hits all alike; from it follow the updates that fit, and the learning rate falls to 0 over these.
`acceptance_i` is 1 - TV of the i-th draft of a chain, after those before it were accepted, on
prompts that no lesson is of; `accepted` the drafts of a chain of three that one expects to be.
"""

import itertools
import statistics
import time

import jax

from fastgrpo_jax import base
from fastgrpo_jax.bench import common, lessons
from fastgrpo_jax.models import eagle
from fastgrpo_jax.train import distill, drafter, optim

RATES = {"muon": 0.02, "adamw": 3e-3}
CHAIN = 3  # drafts that are examined
TIMED = 5  # updates of each that are timed


def add_arguments(parser) -> None:
    """Add this suite's options."""
    lessons.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=180, help="of training, for each")
    parser.add_argument("--token_loss", default=",".join(distill.TOKEN_LOSSES), help="list")
    parser.add_argument("--unroll", default="1,2,3", help="list")
    parser.add_argument("--feature_weight", default="0.2", help="list")
    parser.add_argument("--token_weight", default="1.0", help="list")
    parser.add_argument("--optimizer", default="muon", help="list")
    parser.add_argument(
        "--learning_rate", type=float, default=0.0, help="0: " + str(RATES).replace("'", "")
    )


def run(args) -> int:
    """Run the suite."""
    args.seconds = min(args.seconds, 0.5) if args.quick else args.seconds
    lessons.check(args)
    if not 0 < args.seconds < 1e6:
        raise base.UserError(f"--seconds is {args.seconds}; allowed: above 0")
    if not 0 < args.held:
        raise base.UserError(f"--held is {args.held}; allowed here: above 0")
    names = ("token_loss", "unroll", "feature_weight", "token_weight", "optimizer")
    choices = list(itertools.product(*(getattr(args, name).split(",") for name in names)))
    made = {choice: _configs(*choice, args.learning_rate) for choice in choices}
    model = common.load(args, "float32")
    material = lessons.prepare(args, model, *made[choices[0]])
    if not material.held:
        raise base.UserError(f"--prompts is {args.prompts}: too few for a lesson of held ones")
    times = _time(args, material, made)
    rows = []
    for choice, (rates, weights) in made.items():
        steps = max(round(args.seconds / times[choice]), 2)
        decaying = dict(schedule="cosine", warmup_steps=min(20, steps // 2), decay_steps=steps)
        rates = optim.OptimConfig(rates.optimizer, rates.learning_rate, **decaying)
        known = _with(material.known, rates, weights)
        _, params, loss = common.train_drafter(known, steps, args.seed)
        found = material.examine(params, unroll=CHAIN)
        rows.append(
            dict(zip(names, choice))
            | {"updates": steps, "update_s": round(times[choice], 4)}
            | {f"acceptance_{i + 1}": round(float(x), 4) for i, x in enumerate(found)}
            | {"accepted": round(accepted(found), 4), "final_loss": round(loss, 4)}
        )
        common.say("  ".join(f"{k} {v}" for k, v in rows[-1].items()))
    best = max(rows, key=lambda row: row["accepted"])
    summary = {f"best_{name}": best[name] for name in (*names, "accepted")}
    common.write(args.out, "distill", args, model, rows, summary)
    return 0


def accepted(chances) -> float:
    """Add up the chances that a chain's first draft is accepted, its second too, and so on."""
    return float(sum(itertools.accumulate(map(float, chances), lambda a, b: a * b)))


def _configs(token_loss, unroll, feature_weight, token_weight, optimizer, learning_rate):
    try:
        numbers = int(unroll), float(feature_weight), float(token_weight)
    except ValueError as error:
        raise base.UserError(f"--unroll or a weight holds no number: {error}") from error
    try:
        rate = learning_rate or RATES.get(optimizer, 0.0)
        rates = optim.OptimConfig(optimizer, rate)
        weights = distill.DistillConfig(numbers[1], numbers[2], token_loss, numbers[0])
    except base.UserError as error:  # which names the keys of a run's config
        text = str(error).replace("drafter.", "--").replace("optim.", "--")
        raise base.UserError(text) from error
    return rates, weights


def _with(known: common.Lessons, rates, weights) -> common.Lessons:
    return known._replace(config=known.config._replace(optim=rates, distill=weights))


def _time(args, material: lessons.Material, made: dict) -> dict[tuple, float]:
    """Time an update of each choice, in turn."""

    def timer(rates, weights):
        known = _with(material.known, rates, weights)
        shape = known.config.eagle
        state = drafter.init(known.config, eagle.init(jax.random.key(args.seed + 1), shape))

        def once(repeat: int) -> float:
            nonlocal state
            lesson = known.lessons[repeat % len(known.lessons)]
            began = time.perf_counter()
            state, _ = drafter.update(known.config, known.frozen, state, lesson)
            jax.block_until_ready(state)
            return time.perf_counter() - began

        return once

    timers = {" ".join(choice): timer(*configs) for choice, configs in made.items()}
    found = common.interleave(timers, TIMED)
    return {choice: statistics.median(found[" ".join(choice)]) for choice in made}
