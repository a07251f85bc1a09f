"""What the engine adds to its bare forwards: a decode block against the sum of its parts.

`overhead` = seconds of a block's round / seconds of the forwards that it contains: the policy's
over the tree with its head, and for a learned drafter each level's with its head and the one
that feeds it what was accepted. Noise, sampling, the walk and the commit are overhead.
All parts are jitted with donated caches, and runs are interleaved.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.bench import common
from fastgrpo_jax.models import eagle, load, policy
from fastgrpo_jax.rollout import decode, draft_vocab, generate, inputs, speculate, strategy
from fastgrpo_jax.rollout import engine as engine_lib


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--rows", default="8,32", help="concurrencies, comma-separated")
    parser.add_argument(
        "--strategies", default="off,learned:2:1:3,ngram:3:1:4", help="comma-separated"
    )
    parser.add_argument("--slots", type=int, default=256, help="cache slots of a row")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of a timed block")
    parser.add_argument("--repeats", type=int, default=7)
    common.add_drafter(parser)
    parser.add_argument("--vocab", type=int, default=8192, help="draft vocabulary; 0: all ids")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))


class Bench(NamedTuple):
    """The fixed parts of one run of this suite."""

    args: object
    model: load.LoadedModel
    head: base.EagleConfig
    weights: speculate.Weights


def run(args) -> int:
    """Run the suite."""
    if args.quick:
        args.slots, args.rounds, args.repeats = 64, 2, 2
    sizes = common.integers(args.rows)
    choices = [strategy.parse(text) for text in args.strategies.split(",")]
    for choice in choices:
        if choice.share:
            raise base.UserError(
                f"--strategies holds {choice}; a share's forward is no bare one to compare with; "
                "allowed: chains and trees without a share"
            )
    if args.rounds < 1 or args.repeats < 1:
        raise base.UserError("--rounds and --repeats must be 1 or more")
    need = 8 + args.rounds * max(c.depth + 1 for c in choices) + max(c.span for c in choices)
    if args.slots < need:
        raise base.UserError(f"--slots is {args.slots}; these rounds need {need} or more")
    model = common.load(args, args.dtype)
    head = common.shape_of(args, model.config)
    params = eagle.init(jax.random.key(args.seed + 1), head)
    weights = speculate.Weights(
        jax.tree.map(jnp.asarray, model.params), params, None, jnp.float32(1)
    )
    weights = common.cast(weights, args.dtype)
    if 0 < args.vocab < model.config.vocab:
        ids = draft_vocab.rank({}, args.vocab, model.config.vocab)
        weights = decode.with_draft_vocab(weights, ids)
    bench = Bench(args, model, head, weights)
    rows = [_measure(bench, size, choice) for size in sizes for choice in choices]
    summary = {f"{row['strategy']}@{row['rows']}": row["overhead"] for row in rows}
    summary["max_overhead"] = max(row["overhead"] for row in rows)
    common.write(args.out, "engine", args, model, rows, summary)
    return 0


def _measure(bench: Bench, rows: int, choice: base.DraftStrategy) -> dict:
    runs = {"block": _block(bench, rows, choice)} | _parts(bench, rows, choice)
    found = common.interleave(runs, bench.args.repeats)
    each = {name: statistics.median(times) for name, times in found.items()}
    counts = {"verify": 1, "level": max(choice.depth - 1, 0), "first": 1, "feed": 1}
    bare = sum(each[name] * counts[name] for name in each if name != "block")
    row = {
        "rows": rows,
        "strategy": str(choice),
        "block_ms": round(each["block"] * 1e3, 3),
        "forwards_ms": round(bare * 1e3, 3),
        "overhead": round(each["block"] / bare, 3),
        "spread": round(common.spread(found["block"]), 3),
    } | {f"{name}_ms": round(s * 1e3, 3) for name, s in each.items() if name != "block"}
    common.say("  ".join(f"{k} {v}" for k, v in row.items()))
    return row


def _block(bench: Bench, rows: int, choice: base.DraftStrategy) -> Callable[[int], float]:
    """Make the function that times a block; it returns seconds of a round."""
    args, config = bench.args, bench.model.config
    learned = choice.drafter == "learned"
    limits = engine_lib.Limits(8, args.slots, args.slots + 8)
    spec = speculate.Spec(config, bench.head if learned else None, rows)
    made = common.engine_for(spec, (rows,), limits, (), [strategy.constant("", choice)], args.slots)
    made.slots = (args.slots,)
    weights = bench.weights if learned else bench.weights._replace(eagle=None)
    request = inputs.Request((tuple(range(1, 9)),), (0,), args.seed, 0)
    sample = inputs.sampling_of(request, rows, inputs.Settings(args.temperature))
    read = generate._prefill(made, weights, request.prompts)
    lines = jnp.arange(rows, dtype=jnp.int32)

    def run(_: int) -> float:
        sequences = inputs.sequences(made, request, limits)
        state = decode.start(read, sequences, lines, lines // rows, args.slots)
        stop, low, rounds = jnp.zeros(0, jnp.int32), jnp.int32(0), jnp.int32(args.rounds)
        jax.block_until_ready((state, sample))
        began = time.perf_counter()
        state, report = decode.decode_block(spec, choice, weights, sample, stop, state, low, rounds)
        done = int(np.asarray(report.rounds))
        return (time.perf_counter() - began) / done

    return run


def _parts(bench: Bench, rows: int, choice: base.DraftStrategy) -> dict[str, Callable]:
    """Make the functions that time the bare forwards of a round."""
    config, head, slots = bench.model.config, bench.head, bench.args.slots
    learned = speculate.learned(bench.weights)

    def timer(call, cache):
        def run(_: int) -> float:
            nonlocal cache
            began = time.perf_counter()
            out, cache = call(cache)
            jax.block_until_ready(out)
            return time.perf_counter() - began

        return run

    tokens = jnp.zeros((rows, choice.nodes), jnp.int32)
    parts = {
        "verify": timer(
            lambda cache: decode.forward(config, bench.weights.policy, tokens, cache),
            policy.new_cache(config, rows, slots),
        )
    }
    if choice.drafter != "learned":
        return parts

    def drafting(nodes: int, width: int, with_head: bool):
        features = jnp.zeros((rows, nodes, width), jnp.dtype(head.dtype))
        return timer(
            lambda cache: decode.draft_step(head, learned, features, cache, with_head),
            eagle.new_cache(head, rows, slots),
        )

    hidden = jnp.zeros((rows, 1, head.hidden), jnp.dtype(head.dtype))
    parts["first"] = timer(lambda cache: (decode.draft_head(learned, hidden), cache), ())
    if choice.depth > 1:
        parts["level"] = drafting(choice.width, head.hidden, True)
    parts["feed"] = drafting(choice.depth + 1, head.reads, False)
    return parts
