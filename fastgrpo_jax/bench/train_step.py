"""The fused train step: peak bytes and seconds with and without each of its savings.

The row `base` is a step over padded rows with the chunked head, layers made again as --remat
says, and a drafter of one unrolled step that is compared over a draft vocabulary. Every other row
has one thing changed: all of a layer kept, its products with weights kept, or nothing kept; no
drafter, more unrolled steps, a drafter compared over all ids, or sequences packed into bins.
`unchunked` has the logits of all response places at one time, and is compared with `keep_none`,
where the layers do not hide what the head takes. Lengths are forced from those of real responses (see `tail`), the longest at the limit.

`peak_bytes` are arguments, temporaries, and results that take no donated argument's place, as the
compiler plans them. Runs are interleaved; a step that would take more than --most_bytes is
compiled only. `packed_speedup` is of real tokens per second over `base`. `chunked_head_ratio` is of
the head alone, with its gradients, for as many places: peak bytes in chunks over all at one time.
"""

import dataclasses
import os
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.bench import common, tail
from fastgrpo_jax.models import eagle, load, policy
from fastgrpo_jax.rollout import draft_vocab
from fastgrpo_jax.train import distill, grpo, optim, packing
from fastgrpo_jax.train import step as step_lib

METHODS = (
    "base", "unchunked", "keep_all", "keep_dots", "keep_none", "no_drafter", "unrolled", "all_ids",
    "packed",
)  # fmt: skip


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of the longest response")
    parser.add_argument("--max_prompt", type=int, default=64, help="tokens of every prompt")
    parser.add_argument("--budget", type=int, default=0, help="of a bin; 0: two longest sequences")
    parser.add_argument("--head_chunk", type=int, default=256)
    parser.add_argument("--remat", default="dots", choices=tuple(policy.REMATS))
    parser.add_argument("--unroll", type=int, default=3, help="steps of the row `unrolled`")
    parser.add_argument("--vocab", type=int, default=8192, help="draft vocabulary; 0: all ids")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated; base is run")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--most_bytes", type=float, default=0, help="that a run may take; 0: 0.7 of the memory"
    )
    common.add_drafter(parser)


class Method(NamedTuple):
    """A step to measure: what it is compiled for, and what it reads."""

    config: step_lib.StepConfig
    batch: step_lib.StepBatch


def run(args) -> int:
    """Run the suite."""
    if args.quick:
        args.group, args.tokens, args.max_prompt, args.head_chunk = 4, 24, 8, 16
        args.vocab, args.repeats = min(args.vocab, 32), min(args.repeats, 2)
    names = ("base", *(name for name in args.methods.split(",") if name != "base"))
    for name in names:
        if name not in METHODS:
            raise base.UserError(f"--methods holds {name!r}; allowed: {', '.join(METHODS)}")
    model = common.load(args, args.dtype)
    made, other = methods(args, model), methods(args, model, other=True)
    state = _new_state(args, model)
    rows, steps = [], {}
    for name in names:
        steps[name] = step_lib.make_train_step(made[name].config)
        rows.append({"method": name, **_plan(steps[name], state, made[name].batch)})
        common.say("  ".join(f"{k} {v}" for k, v in rows[-1].items()))
    small = [row["method"] for row in rows if row["peak_bytes"] <= _most_bytes(args)]
    given = {name: (steps[name], made[name].batch, other[name].batch) for name in small}
    found = _time(given, state, args.repeats)
    batch = made["base"].batch
    tokens = int(np.sum(batch.length - batch.prompt_length))
    for row in rows:
        times = found.get(row["method"])
        row["seconds"] = times and round(statistics.median(times), 4)
        row["tok_s"] = times and round(tokens / row["seconds"], 2)
        row["spread"] = times and round(common.spread(times), 3)
    summary = {
        "tokens": tokens,
        "places": batch.length.size * args.tokens,
        "executables": max((steps[name]._cache_size() for name in small), default=0),
        **packing.statistics(made["packed"].batch.packed),
        "chunked_head_ratio": round(_head_ratio(args, model), 4),
        **_ratios({row["method"]: row for row in rows}),
    }
    common.write(args.out, "train_step", args, model, rows, summary)
    return 0


def methods(args, model: load.LoadedModel, other: bool = False) -> dict[str, Method]:
    """Make all steps that can be measured; `other` ones have another batch of the same shape."""
    count, longest = args.prompts * args.group, args.max_prompt + args.tokens
    if longest > model.config.max_positions:
        raise base.UserError(
            f"--max_prompt and --tokens are {longest} together; the model has "
            f"{model.config.max_positions} positions"
        )
    prompt = np.full(count, args.max_prompt, np.int32)
    lengths = tail.lengths(count, args.tokens, args.seed + other, spread=not other)
    length = (prompt + lengths).astype(np.int32)
    rng = np.random.default_rng(args.seed + other)
    tokens = rng.integers(0, model.config.vocab, (count, longest)).astype(np.int32)
    groups = np.arange(count) // args.group * args.group
    tokens[:, : args.max_prompt] = tokens[groups, : args.max_prompt]
    few = 0 < args.vocab < model.config.vocab
    ids = jnp.asarray(draft_vocab.rank({}, args.vocab, model.config.vocab)) if few else None
    batch = step_lib.StepBatch(
        tokens=jnp.asarray(tokens),
        prompt_length=jnp.asarray(prompt),
        length=jnp.asarray(length),
        logps=jnp.zeros(tokens.shape, jnp.float32),
        advantages=jnp.asarray(rng.normal(size=count), jnp.float32),
        temperature=jnp.ones(count, jnp.float32),
        draft_ids=ids,
    )
    rates = optim.OptimConfig(learning_rate=1e-6)
    config = step_lib.StepConfig(
        policy=model.config,
        eagle=common.shape_of(args, model.config),
        loss=grpo.LossConfig(),
        optim=rates,
        drafter_optim=rates,
        distill=distill.DistillConfig(),
        max_response=args.tokens,
        max_prompt=args.max_prompt,
        group=args.group,
        head_chunk=args.head_chunk,
        remat=args.remat,
    )
    packed = packing.pack(prompt, length, args.group, longest, args.budget or 2 * longest)

    def changed(**changes) -> Method:
        return Method(dataclasses.replace(config, **changes), batch)

    return {
        "base": changed(),
        "unchunked": changed(head_chunk=count * args.tokens, remat="full"),
        "keep_all": changed(remat="none"),
        "keep_dots": changed(remat="dots"),
        "keep_none": changed(remat="full"),
        "no_drafter": changed(eagle=None),
        "unrolled": changed(distill=distill.DistillConfig(unroll=args.unroll)),
        "all_ids": Method(config, batch._replace(draft_ids=None)),
        "packed": Method(config, batch._replace(packed=packed)),
    }


def _new_state(args, model: load.LoadedModel) -> base.TrainState:
    """Make a state that fits all methods; a step without a drafter passes it on."""
    rates = optim.OptimConfig()
    shape = common.shape_of(args, model.config)
    config = step_lib.StepConfig(
        policy=model.config, eagle=shape, loss=grpo.LossConfig(), optim=rates, drafter_optim=rates,
        distill=distill.DistillConfig(), max_response=1,
    )  # fmt: skip
    drafter = eagle.init(jax.random.key(args.seed + 1), shape)
    return step_lib.init_state(config, model.params, drafter)


def _plan(step, state: base.TrainState, batch: step_lib.StepBatch) -> dict[str, int]:
    """Compile a step and read what memory it was planned with."""
    found = step.lower(state, batch).compile().memory_analysis()
    return {"peak_bytes": _bytes(found), "temp_bytes": found.temp_size_in_bytes}


def _head_ratio(args, model: load.LoadedModel) -> float:
    """Compare what the head takes in chunks and at one time; compiled only."""
    places, wide = args.prompts * args.group * args.tokens, jnp.float32

    def of(*shape, dtype=wide):
        return jax.ShapeDtypeStruct(shape, dtype)

    c = model.config
    moving = of(c.vocab, c.hidden), of(places, c.hidden), of(places, 1, c.hidden)
    few = 0 < args.vocab < c.vocab
    ids = of(args.vocab, dtype=jnp.int32) if few else None
    rest = of(places, dtype=jnp.int32), ids
    chunked, whole = (
        _bytes(step_lib.head_gradients.lower(chunk, moving, *rest).compile().memory_analysis())
        for chunk in (args.head_chunk, places)
    )
    return chunked / whole


def _bytes(found) -> int:
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes


def _time(steps: dict, state: base.TrainState, repeats: int) -> dict[str, list[float]]:
    """Time steps that go on from one another's state, so that there is one of it only.

    The first call of each, which compiles, is with the other batch: the executable must fit both.
    """

    def timer(step, batch, other):
        def run(repeat: int) -> float:
            nonlocal state
            began = time.perf_counter()
            state, metrics = step(state, batch if repeat else other)
            jax.block_until_ready((state, metrics))
            return time.perf_counter() - began

        return run

    return common.interleave({name: timer(*given) for name, given in steps.items()}, repeats)


def _ratios(rows: dict[str, dict]) -> dict[str, float]:
    """Compare rows; what was not measured is left out."""
    found = {}
    if {"keep_none", "unchunked"} <= rows.keys():
        for name in ("peak", "temp"):
            whole, chunked = (rows[x][f"{name}_bytes"] for x in ("unchunked", "keep_none"))
            found[f"chunked_{name}_ratio"] = chunked / whole
    seconds = {name: row["seconds"] for name, row in rows.items() if row["seconds"]}
    if {"base", "no_drafter"} <= seconds.keys():
        found["drafter_share"] = 1 - seconds["no_drafter"] / seconds["base"]
    if {"base", "packed"} <= seconds.keys():
        found["packed_speedup"] = seconds["base"] / seconds["packed"]
    return {name: round(value, 4) for name, value in found.items()}


def _most_bytes(args) -> float:
    """Say how many bytes a step may take: of the device, or of this machine."""
    if args.most_bytes:
        return args.most_bytes
    known = jax.devices()[0].memory_stats() or {}
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0.7 * known.get("bytes_limit", machine)
