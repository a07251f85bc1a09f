"""What all suites share: the frame of a result, prompts, and interleaved timing."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle
from fastgrpo_jax.models import load as load_lib
from fastgrpo_jax.rollout import decode, speculate, strategy
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.train import data, distill, drafter, forward, optim
from fastgrpo_jax.train.layout import StepBatch


def write(
    out: str, suite: str, args, model: load_lib.LoadedModel, rows: list, summary: dict
) -> None:
    """Write a suite's result in the frame that all suites have, atomically."""
    device = jax.devices()[0]
    result = {
        "suite": suite,
        "device": f"{device.platform} {device.device_kind}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("jax", "flax", "fastgrpo-jax")},
        },
        "date": datetime.date.today().isoformat(),
        "model": args.model,
        "seed": args.seed,
        "options": {k: v for k, v in vars(args).items() if k not in ("out", "model", "seed")},
        "rows": rows,
        "summary": summary,
    }
    path = pathlib.Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(part, path)
    say(f"\n{suite}: " + ", ".join(f"{k} {v}" for k, v in summary.items()) + f"\nwritten: {out}")


def say(text: str) -> None:
    """Report progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def integers(text: str) -> tuple[int, ...]:
    """Read a comma-separated list of positive integers.

    Raises:
      UserError: if it is not one.
    """
    try:
        found = tuple(int(x) for x in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise base.UserError(f"{text!r} is no list of sizes; allowed: 1,8,32 and the like")
    return found


def open_task(name: str, seed: int) -> data.Task:
    """Open a task in the sizes that all suites use."""
    return data.open_task(name, seed=seed, shuffle=False, max_operand=20, max_terms=5)


def chat_prompts(model: load_lib.LoadedModel, task: data.Task, count: int, limit: int):
    """Render the first prompts of a task that have at most `limit` tokens."""
    rendering = data.Rendering(
        model.tokenizer, "", bool(model.tokenizer.chat_template), limit, "drop"
    )
    try:
        prompts, _, _ = data.take(task, 0, count, rendering)
    except base.UserError as error:
        raise base.UserError(f"--max_prompt is {limit}: {error}") from error
    return tuple(p.ids for p in prompts)


def load(args, dtype: str) -> load_lib.LoadedModel:
    """Load the model that the options name, in a compute dtype."""
    return load_lib.load(args.model, dtype, args.seed, weights=args.weights)


def check_length(model: load_lib.LoadedModel, limits: engine_lib.Limits) -> None:
    """Refuse sequences that the model has no positions for."""
    if limits.total > model.config.max_positions:
        raise base.UserError(
            f"--tokens is {limits.response} after prompts of up to {limits.prompt} tokens; the "
            f"model has {model.config.max_positions} positions"
        )


def interleave(
    runs: dict[str, Callable[[int], float]], repeats: int, warm: int = 1
) -> dict[str, list[float]]:
    """Run every method once per repeat, in turn, so that a noisy machine hits all alike.

    Each function is given the repeat's number and returns its own figure. The first `warm` calls
    are not measured: they compile, and let what adapts get to know its costs.
    """
    for i in range(warm):
        for run in runs.values():
            run(-i)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(repeats):
        for name, run in runs.items():
            found[name].append(run(i + 1))
    return found


def groups(batch: base.RolloutBatch, group: int) -> list[base.RolloutBatch]:
    """Cut a rollout into its groups."""
    starts = range(0, batch.length.shape[0], group)
    return [base.RolloutBatch(*(x[i : i + group] for x in batch)) for i in starts]


def spread(values: list[float]) -> float:
    """Return (max - min) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def add_drafter(parser) -> None:
    """Add the options that shape a learned drafter; `shape_of` reads them."""
    parser.add_argument("--kind", default="fastgrpo", choices=eagle.KINDS)
    parser.add_argument(
        "--features", type=int, default=1, choices=(1, 3), help="depths of the policy it reads"
    )


def shape_of(args, policy: base.PolicyConfig) -> base.EagleConfig:
    """Shape the learned drafter that the options ask for."""
    return eagle.config_for(policy, args.kind, args.features)


class Lessons(NamedTuple):
    """What a drafter is trained on: finished rollouts of whole groups, read by the policy."""

    config: drafter.Config
    frozen: drafter.Frozen
    lessons: list[drafter.Lesson]


def read_lessons(
    model: load_lib.LoadedModel,
    shape: base.EagleConfig,
    batches: list[base.RolloutBatch],
    group: int,
    rates: optim.OptimConfig,
    weights: distill.DistillConfig,
    ids: np.ndarray | None = None,
) -> Lessons:
    """Let the policy read rollouts, for a drafter of some shape with draft vocabulary `ids`."""
    frame = forward.Frame(
        model.config,
        group,
        int(max(b.prompt_length.max() for b in batches)),
        int(max((b.length - b.prompt_length).max() for b in batches)),
    )
    config = drafter.Config(frame, shape, rates, weights)
    params = jax.tree.map(jnp.asarray, model.params)
    lessons = []
    for batch in batches:
        rows = batch.length.shape[0]
        known = StepBatch(
            tokens=jnp.asarray(batch.tokens),
            prompt_length=jnp.asarray(batch.prompt_length),
            length=jnp.asarray(batch.length),
            logps=jnp.asarray(batch.logps),
            advantages=jnp.zeros(rows, jnp.float32),
            temperature=jnp.ones(rows, jnp.float32),
        )
        lessons.append(drafter.read(config, params, known))
    return Lessons(config, drafter.freeze(params, ids), lessons)


def train_drafter(
    known: Lessons,
    steps: int,
    seed: int,
    heard: Callable[[int, float, base.Params], None] = lambda step, loss, params: None,
) -> tuple[base.EagleConfig, base.Params, float]:
    """Train a drafter from random, one lesson a step, in turn.

    Returns it and its last loss; `heard` is told of every tenth step and the last.
    """
    config, frozen, lessons = known
    state = drafter.init(config, eagle.init(jax.random.key(seed + 1), config.eagle))
    loss = float("nan")
    for i in range(steps):
        state, loss = drafter.update(config, frozen, state, lessons[i % len(lessons)])
        if (i + 1) % 10 == 0 or i + 1 == steps:
            heard(i + 1, float(loss), state.params)
    return config.eagle, state.params, float(loss)


def quick_drafter(
    model: load_lib.LoadedModel,
    shape: base.EagleConfig,
    batches: list[base.RolloutBatch],
    steps: int,
    seed: int,
    group: int,
) -> tuple[base.EagleConfig, base.Params, float]:
    """Train a drafter by FastGRPO's loss for a few steps, as the suites need one."""
    rates = optim.OptimConfig(learning_rate=1e-3, warmup_steps=5)
    known = read_lessons(model, shape, batches, group, rates, distill.DistillConfig())
    return train_drafter(known, steps, seed)


def plain() -> strategy.Controller:
    """Make the controller that never drafts."""
    return strategy.constant("plain", base.PLAIN)


def cast(weights: speculate.Weights, dtype: str) -> speculate.Weights:
    """Cast the weights to a compute dtype."""
    policy, head = decode.cast((weights.policy, weights.eagle), jnp.dtype(dtype))
    return weights._replace(policy=policy, eagle=head)


def response_tokens(batch: base.RolloutBatch) -> int:
    """Count the tokens that a rollout emitted."""
    return int(np.sum(batch.length - batch.prompt_length))


def engine_for(
    spec: speculate.Spec,
    rows: tuple[int, ...],
    limits: engine_lib.Limits,
    stop,
    controllers,
    slot_step,
    total: int = 0,
) -> engine_lib.Engine:
    """Lay out an engine for all of some controllers."""
    spans = [s.span for c in controllers for r in rows for s in c.possible(r)]
    return engine_lib.make_engine(
        spec,
        rows=rows,
        total=total,
        limits=limits,
        stop_tokens=stop,
        slot_step=slot_step,
        span=max(spans),
    )
