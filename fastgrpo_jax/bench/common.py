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

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle, load
from fastgrpo_jax.rollout import decode, generate, strategy
from fastgrpo_jax.train import data, distill, grpo, optim
from fastgrpo_jax.train import step as step_lib


def write(out: str, suite: str, args, model: load.LoadedModel, rows: list, summary: dict) -> None:
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


def chat_prompts(model: load.LoadedModel, task: data.Task, count: int, limit: int):
    """Render the first prompts of a task that have at most `limit` tokens."""
    rendering = data.Rendering(
        model.tokenizer, "", bool(model.tokenizer.chat_template), limit, "drop"
    )
    try:
        prompts, _, _ = data.take(task, 0, count, rendering)
    except base.UserError as error:
        raise base.UserError(f"--max_prompt is {limit}: {error}") from error
    return tuple(p.ids for p in prompts)


def check_length(model: load.LoadedModel, limits: generate.Limits) -> None:
    """Refuse sequences that the model has no positions for."""
    if limits.total > model.config.max_positions:
        raise base.UserError(
            f"--tokens is {limits.response} after prompts of up to {limits.prompt} tokens; the "
            f"model has {model.config.max_positions} positions"
        )


def interleave(runs: dict[str, Callable[[int], float]], repeats: int) -> dict[str, list[float]]:
    """Run every method once per repeat, in turn, so that a noisy machine hits all alike.

    Each function is given the repeat's number and returns its own figure. A first unmeasured
    call compiles.
    """
    for run in runs.values():
        run(0)
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


def train_drafter(
    model: load.LoadedModel,
    kind: str,
    batches: list[base.RolloutBatch],
    steps: int,
    temperature: float,
    seed: int,
    group: int,
    *,
    learning_rate: float = 1e-3,
    weights: distill.DistillConfig | None = None,
    heard: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[base.EagleConfig, base.Params, float]:
    """Train a drafter from random on finished rollouts of whole groups, one a step.

    Returns it and its last loss; `heard` is told of every tenth step and the last.
    """
    config = eagle.config_for(model.config, kind)
    params = eagle.init(jax.random.key(seed + 1), config)
    span = int(max((b.length - b.prompt_length).max() for b in batches))
    step_config = step_lib.StepConfig(
        policy=model.config,
        eagle=config,
        loss=grpo.LossConfig(),
        optim=optim.OptimConfig(),
        drafter_optim=optim.OptimConfig(learning_rate=learning_rate, warmup_steps=5),
        distill=weights or distill.DistillConfig(),
        max_response=max(span, 1),
        max_prompt=int(max(b.prompt_length.max() for b in batches)),
        group=group,
    )
    step = step_lib.make_distill_step(step_config)
    state = step_lib.init_distill(step_config, params)
    policy_params = jax.tree.map(jnp.asarray, model.params)
    loss = float("nan")
    for i in range(steps):
        batch = batches[i % len(batches)]
        rows = batch.length.shape[0]
        state, loss = step(
            policy_params,
            state,
            step_lib.StepBatch(
                tokens=jnp.asarray(batch.tokens),
                prompt_length=jnp.asarray(batch.prompt_length),
                length=jnp.asarray(batch.length),
                logps=jnp.asarray(batch.logps),
                advantages=jnp.zeros(rows, jnp.float32),
                temperature=jnp.full(rows, temperature, jnp.float32),
            ),
        )
        if (i + 1) % 10 == 0 or i + 1 == steps:
            heard(i + 1, float(loss))
    return config, state.params, float(loss)


def plain() -> strategy.Controller:
    """Make the controller that never drafts."""
    return strategy.constant("plain", base.PLAIN)


def cast(weights: decode.Weights, dtype: str) -> decode.Weights:
    """Cast the weights to a compute dtype."""
    policy, head = decode.cast((weights.policy, weights.eagle), jnp.dtype(dtype))
    return weights._replace(policy=policy, eagle=head)


def response_tokens(batch: base.RolloutBatch) -> int:
    """Count the tokens that a rollout emitted."""
    return int(np.sum(batch.length - batch.prompt_length))


def engine_for(
    spec: decode.Spec,
    rows: tuple[int, ...],
    limits: generate.Limits,
    stop,
    controllers,
    slot_step,
    total: int = 0,
) -> generate.Engine:
    """Lay out an engine for all of some controllers."""
    spans = [s.span for c in controllers for r in rows for s in c.possible(r)]
    return generate.make_engine(
        spec,
        rows=rows,
        total=total,
        limits=limits,
        stop_tokens=stop,
        slot_step=slot_step,
        span=max(spans),
    )
