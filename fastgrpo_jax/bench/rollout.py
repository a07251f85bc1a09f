"""Rollout speed by concurrency and method, prefill included, interleaved repeats.

Methods: plain_nodrop (finished rows are kept until all are done, as the papers' baseline does),
plain (finished rows are dropped), eagle2_fixed (one deterministic tree at every concurrency),
fastgrpo (tree by live concurrency, shared noise), beg_mab and goodput (adaptive), ngram (chain
by live concurrency), hf_generate (transformers on CPU torch, same weights, float32; needs
torch), and any one strategy at every concurrency, such as learned:2:1:3.

Adaptive controllers keep what they have seen from one repeat to the next, as in training.
With --drafter=oracle:A, `bound_ratio` is what the best chain could reach over plain decoding if
a round cost no more than its bare forward: max over chains of E[tokens] / measured cost.

Rows come in groups; --rows=8,32 --group=8 answers 1 and 4 prompts. With --lengths=forced every
row gets exactly --tokens tokens; with natural, rows end at their stop tokens.
"""

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.bench import common, hf_generate
from fastgrpo_jax.models import eagle, eagle_file, load, policy
from fastgrpo_jax.rollout import (
    bandit,
    buckets,
    calibrate,
    corpus,
    costs,
    decode,
    draft_ngram,
    draft_oracle,
    draft_vocab,
    generate,
    goodput,
    strategy,
)

METHODS = (
    "plain_nodrop",
    "plain",
    "eagle2_fixed",
    "fastgrpo",
    "beg_mab",
    "goodput",
    "ngram",
    "hf_generate",
)
PLAIN = ("plain_nodrop", "plain", "hf_generate")


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--rows", default="1,8,32", help="concurrencies, comma-separated")
    parser.add_argument("--methods", default="plain_nodrop,plain,eagle2_fixed,fastgrpo,ngram")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt, at most rows")
    parser.add_argument("--tokens", type=int, default=64, help="response tokens, at most")
    parser.add_argument("--lengths", default="forced", choices=("forced", "natural"))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--warm",
        type=int,
        default=1,
        help="unmeasured plays before; adaptive methods learn in them",
    )
    parser.add_argument("--task", default="arithmetic", help="arithmetic, addition or FILE.jsonl")
    parser.add_argument(
        "--max_prompt", type=int, default=96, help="tokens; longer ones are skipped"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--drafter",
        default="train:40",
        help="train:STEPS (on this policy's own rollouts), random, FILE.safetensors (bench "
        "drafter), none, or oracle:ACCEPTANCE",
    )
    parser.add_argument(
        "--verify",
        default="draws",
        choices=("draws", "rejection"),
        help="rejection: usual speculative sampling, chains only",
    )
    parser.add_argument("--vocab", type=int, default=8192, help="draft vocabulary; 0: all ids")
    parser.add_argument("--tau", type=float, default=1.0, help="of a node's estimated acceptance")
    parser.add_argument(
        "--earlier",
        type=int,
        default=0,
        help="answers to each prompt, from other noise, that the n-gram drafter looks in too",
    )
    parser.add_argument("--max_rows", type=int, default=0, help="rows decoded at one time; 0: all")
    parser.add_argument("--show_costs", action="store_true", help="print the cost table")
    parser.add_argument("--measure_seconds", type=float, default=120.0, help="of the cost table")
    parser.add_argument("--explore", type=float, default=0.02, help="goodput's share of time")
    parser.add_argument("--kind", default="fastgrpo", choices=eagle.KINDS)
    parser.add_argument("--fixed", default="learned:3:4:8", help="tree of eagle2_fixed")
    parser.add_argument("--c_peak", type=int, default=0, help="0: measured")


class Bench(NamedTuple):
    """The fixed parts of one run of this suite."""

    args: Any
    model: load.LoadedModel
    prompts: tuple[tuple[int, ...], ...]
    limits: generate.Limits
    head: base.EagleConfig | None
    weights: decode.Weights
    table: costs.Table | None
    accept: float | None  # of the oracle, where it drafts

    @property
    def drafters(self) -> tuple[str, ...]:
        """Name the drafters that adaptive controllers choose from."""
        if self.accept is not None:
            return ("oracle",)
        return ("learned", "ngram") if self.head else ("ngram",)


def run(args) -> int:
    """Run the suite."""
    methods, sizes = args.methods.split(","), common.integers(args.rows)
    bench = prepare(args)
    table = [row for rows in sizes for row in measure(bench, rows, methods)[0]]
    summary = {"drafter": args.drafter, "temperature": args.temperature}
    if bench.table:
        summary["c_peak"] = args.c_peak or costs.c_peak(bench.table)
    for row in table:
        summary[f"{row['method']}@{row['rows']}"] = row["ratio_vs_plain"]
    common.write(args.out, "rollout", args, bench.model, table, summary)
    return 0


def prepare(args) -> Bench:
    """Check the options and make what all methods need.

    Raises:
      UserError: for an option that cannot be.
    """
    if args.quick:
        args.repeats, args.tokens = 2, min(args.tokens, 16)
        args.measure_seconds = 0.0
        args.drafter = "random" if args.drafter.startswith("train") else args.drafter
    methods = args.methods.split(",")
    for name in methods:
        if name not in METHODS:
            _strategy(name)
    if "hf_generate" in methods and importlib.util.find_spec("torch") is None:
        raise base.UserError(
            "--methods=hf_generate needs torch: pip install 'fastgrpo-jax[parity]'"
        )
    if not 0 <= args.temperature < float("inf"):
        raise base.UserError(f"--temperature is {args.temperature}; allowed: 0 or more")
    for name, meaning in (("vocab", " (all ids)"), ("earlier", "")):
        if getattr(args, name) < 0:
            raise base.UserError(f"--{name} is {getattr(args, name)}; allowed: 0{meaning} or more")
    try:
        strategy.parse(args.fixed)
    except base.UserError as error:
        raise base.UserError(f"--fixed: {error}") from error
    sizes = common.integers(args.rows)
    bench = _open(args, sizes, methods)
    if args.show_costs:
        common.say(costs.describe(_table(bench), sizes, bench.drafters))
    return bench


def _strategy(name: str) -> base.DraftStrategy:
    """Read a method that is a strategy."""
    try:
        return strategy.parse(name)
    except base.UserError as error:
        raise base.UserError(
            f"--methods holds {name!r}; allowed: {', '.join(METHODS)}, or drafter:depth:width:nodes"
        ) from error


def _open(args, sizes, methods) -> Bench:
    word, _, number = args.drafter.partition(":")
    good = {"random": not number, "none": not number, "train": number.isdecimal()}
    good["oracle"] = number.replace(".", "", 1).isdecimal() and 0 <= float(number) <= 1
    if not good.get(word, args.drafter.endswith(".safetensors")):
        raise base.UserError(
            f"--drafter is {args.drafter!r}; allowed: train:STEPS, random, none, "
            "FILE.safetensors, oracle:ACCEPTANCE such as oracle:0.8"
        )
    model = common.load(args, args.dtype)
    count = max(-(-rows // min(args.group, rows)) for rows in sizes)
    prompts = common.chat_prompts(
        model, common.open_task(args.task, args.seed), count, args.max_prompt
    )
    longest = max(map(len, prompts))
    limits = generate.Limits(longest, args.tokens, longest + args.tokens)
    common.check_length(model, limits)
    weights = decode.Weights(jax.tree.map(jnp.asarray, model.params))
    accept = float(number) if word == "oracle" else None
    bench = Bench(args, model, prompts, limits, None, weights, None, accept)
    if set(methods) <= set(PLAIN) and not args.show_costs:
        return bench
    if word not in ("none", "oracle") and set(methods) - {*PLAIN, "ngram"}:
        head, params, counts = _drafter(bench)
        weights = weights._replace(eagle=params, tau=jnp.float32(args.tau))
        if 0 < args.vocab < model.config.vocab:
            ids = draft_vocab.rank(counts, args.vocab, model.config.vocab, model.stop_tokens)
            weights = decode.with_draft_vocab(weights, ids)
        bench = bench._replace(head=head, weights=weights)
    return bench._replace(table=_table(bench))


def _table(bench: Bench) -> costs.Table:
    """Read or measure the cost table."""
    config = bench.model.config

    def measure():
        common.say(f"measuring what rounds cost, for about {bench.args.measure_seconds:.0f} s")
        return calibrate.measure(
            config, bench.head, bench.weights, budget_s=bench.args.measure_seconds
        )

    folder = "" if bench.args.quick else bench.args.compilation_cache
    about = f"{config} {bench.head} {bench.args.vocab}"
    return bench.table or calibrate.cached(folder, about, measure)


def _drafter(bench: Bench) -> tuple[base.EagleConfig, base.Params, dict[str, int]]:
    """Make the learned drafter: random, from a file, or trained on the policy's own rollouts.

    Returns its shape, its weights, and the counts of tokens that rank its vocabulary.
    """
    args = bench.args
    if args.drafter == "random":
        config = eagle.config_for(bench.model.config, args.kind)
        return config, eagle.init(jax.random.key(args.seed + 1), config), {}
    if args.drafter.endswith(".safetensors"):
        config, params, counts = eagle_file.load(args.drafter, bench.model.config)
        return config, jax.tree.map(jnp.asarray, params), counts
    count, steps = 8, int(args.drafter.partition(":")[2])  # groups of eight, of other prompts
    task = common.open_task(args.task, args.seed + 1)
    prompts = common.chat_prompts(bench.model, task, count, bench.limits.prompt)
    played = _player(bench, "plain", prompts, 8)(1000).batch
    batches = common.groups(played, 8)
    config, params, loss = common.quick_drafter(
        bench.model, args.kind, batches, steps, args.seed, 8
    )
    common.say(f"trained the drafter for {steps} steps on {count} prompts: loss {loss:.3f}")
    return config, params, draft_vocab.count(base.responses(played))


def _controller(bench: Bench, method: str) -> strategy.Controller:
    if method in PLAIN:
        return common.plain()
    if method not in METHODS:
        return strategy.constant(method, _strategy(method))
    args, table = bench.args, bench.table
    chains = args.verify == "rejection"
    arms = functools.cache(
        lambda rows: tuple(
            s for s in costs.arms(table, rows, bench.drafters) if s.chain or not chains
        )
    )
    if method == "goodput":
        settings = goodput.Settings(explore=args.explore)
        return goodput.controller(arms, functools.partial(costs.seconds, table), settings)
    if method == "beg_mab":
        return bandit.controller(arms)
    inner = strategy.constant(method, strategy.parse(args.fixed))
    if method != "eagle2_fixed":
        inner = strategy.fastgrpo(
            args.c_peak or costs.c_peak(table),
            n_max=160,
            depth_max=5,
            width_max=8,
            alpha=0.75,
            drafter="ngram" if method == "ngram" else "learned",
        )
    if bench.accept is None or method == "ngram":
        return inner
    return strategy.by_rows(method, lambda rows: _told(inner.possible(rows)[0]))


def _told(choice: base.DraftStrategy) -> base.DraftStrategy:
    """Give the oracle, whose trees are fans, a chain as long as a tree is deep."""
    if not choice.depth:
        return choice
    return base.DraftStrategy("oracle", choice.depth, 1, choice.depth + 1)


def _player(
    bench: Bench, method: str, prompts, group: int, caps: tuple[int, ...] | None = None
) -> Callable[[int], generate.Rollout]:
    """Make the function that runs one rollout of a method; its argument varies the noise.

    `caps` are response limits of the rows, where they differ.
    """
    args = bench.args
    controller = _controller(bench, method)
    total = len(prompts) * group
    ladder = buckets.row_ladder(min(args.max_rows or total, total))
    choices = [s for rows in ladder for s in controller.possible(rows)]
    used = {s.drafter for s in choices}
    draft_vocab.check(args.vocab, choices, "--vocab")
    rejection = args.verify == "rejection"
    if rejection and any(s.depth and not s.chain for s in choices):
        raise base.UserError(
            f"--verify is 'rejection' and --methods holds {method!r}, which drafts more than chains"
        )
    spec = decode.Spec(
        bench.model.config,
        bench.head if "learned" in used else None,
        group,
        shared_noise=method != "eagle2_fixed",
        rejection=rejection,
    )
    stop = () if args.lengths == "forced" else bench.model.stop_tokens
    step = bench.limits.total + (16 if used - {"off"} else 0)
    engine = common.engine_for(spec, ladder, bench.limits, stop, [controller], step, total)
    engine.keep_finished = method == "plain_nodrop"
    weights = bench.weights if "learned" in used else bench.weights._replace(eagle=None)
    plain = _player(bench, "plain", prompts, group, caps) if "oracle" in used else None
    if "ngram" in used and args.earlier:
        weights = weights._replace(earlier=_earlier(bench, prompts, group, spec.ngram_longest))
    memory: strategy.Memory = {}

    def play(noise: int) -> generate.Rollout:
        nonlocal memory
        places = tuple(range(len(prompts)))
        request = generate.Request(prompts, places, args.seed, noise, caps=caps)
        known = (
            weights._replace(oracle=_answers(plain(noise).batch, bench.accept))
            if plain
            else weights
        )
        settings = generate.Settings(args.temperature)
        done = generate.rollout(
            engine, known, request, settings, bench.limits, controller, memory=memory
        )
        memory = done.memory
        return done

    return play


def _earlier(bench: Bench, prompts, group: int, tail: int) -> draft_ngram.Earlier:
    """Answer the prompts before, as an earlier epoch of a training would have."""
    play, known = _player(bench, "plain", prompts, group), {}
    bounds = {"answers": bench.args.earlier, "tokens": 2**31}
    for i in range(-(-bench.args.earlier // group)):
        known = corpus.learn(known, prompts, base.responses(play(2000 + i).batch), **bounds)
    return corpus.recall(
        known, prompts, answers=bench.args.earlier, tail=tail, width=bench.limits.total
    )


def play_plain(bench: Bench, rows: int) -> base.RolloutBatch:
    """Answer prompts plainly, `rows` rows in all."""
    group = min(bench.args.group, rows)
    return _player(bench, "plain", bench.prompts[: rows // group], group)(0).batch


def _answers(batch: base.RolloutBatch, accept: float) -> draft_oracle.OracleParams:
    """Tell the oracle what plain decoding says."""
    known = np.arange(batch.tokens.shape[1]) < batch.length[:, None]
    tokens = jnp.asarray(np.where(known, batch.tokens, -1))
    return draft_oracle.OracleParams(tokens, jnp.float32(accept))


def _bound(bench: Bench, rows: int) -> dict:
    """Find what the best chain of the oracle could gain if rounds cost their bare forward."""
    config, slots = bench.model.config, bench.limits.total + 16
    choices = (base.PLAIN, *costs.candidates("oracle"))
    runs = {str(s): _bare(config, bench.weights, rows, s.nodes, slots) for s in choices}
    found = common.interleave(runs, max(bench.args.repeats, 5))
    plain = statistics.median(found["off"])
    gains = {
        str(s): costs.tokens_at(s, bench.accept) * plain / statistics.median(found[str(s)])
        for s in choices
    }
    common.say(
        f"rows {rows}  bounds by chain: "
        + ", ".join(
            f"{name} {gain:.3f} ({statistics.median(found[name]) * 1e3:.1f} ms)"
            for name, gain in gains.items()
        )
    )
    best = max(gains, key=gains.__getitem__)
    return {"bound_ratio": round(gains[best], 3), "bound_strategy": best}


def _bare(config, weights, rows: int, nodes: int, slots: int) -> Callable[[int], float]:
    """Make the function that times a forward of so many rows and tokens."""
    tokens = jnp.zeros((rows, nodes), jnp.int32)
    cache = policy.new_cache(config, rows, slots)

    def run(_: int) -> float:
        nonlocal cache
        began = time.perf_counter()
        out, cache = decode.forward(config, weights.policy, tokens, cache)
        jax.block_until_ready(out)
        return time.perf_counter() - began

    return run


def measure(
    bench: Bench, rows: int, methods, caps: tuple[int, ...] | None = None
) -> tuple[list[dict], dict[str, generate.Rollout]]:
    """Time every method at one concurrency.

    Returns a row of the table for each, and each one's last rollout.
    """
    group = min(bench.args.group, rows)
    if rows % group:
        raise base.UserError(f"--rows holds {rows}; allowed: multiples of --group={group}")
    prompts = bench.prompts[: rows // group]
    last: dict[str, generate.Rollout] = {}
    runs = {}
    for method in methods:
        if method == "hf_generate":
            runs[method] = hf_generate.player(
                bench.model, prompts, group, bench.args, bench.limits.response
            )
            continue
        play = _player(bench, method, prompts, group, caps)

        def timed(repeat: int, play=play, method=method) -> float:
            """Play until nothing compiles: the same noise takes the same buckets again."""
            noise = repeat % 2**16  # of repeats before the first too
            done = play(noise)
            while done.compiled:
                done = play(noise)
            last[method] = done
            seconds = done.prefill_seconds + done.decode_seconds
            return common.response_tokens(done.batch) / seconds

        runs[method] = timed
    found = common.interleave(runs, bench.args.repeats, bench.args.warm)
    table = [_row(rows, method, found, last.get(method)) for method in methods]
    if bench.accept is not None:
        bound = _bound(bench, rows)
        table = [row | bound for row in table]
    return table, last


def _row(rows: int, method: str, found: dict[str, list[float]], last) -> dict:
    rate = statistics.median(found[method])

    def ratio(other):
        if other not in found:
            return None
        return round(statistics.median(a / b for a, b in zip(found[method], found[other])), 3)

    accept = generate.statistics(last).get("spec/accept_length") if last else None
    row = {
        "rows": rows,
        "method": method,
        "tok_s": round(rate, 2),
        "ratio_vs_plain": ratio("plain"),
        "ratio_vs_nodrop": ratio("plain_nodrop"),
        "accept_length": accept and round(accept, 3),
        "spread": round(common.spread(found[method]), 3),
    }
    if method != "hf_generate" and "hf_generate" in found:
        row["ratio_vs_hf"] = ratio("hf_generate")
    common.say("  ".join(f"{k} {v}" for k, v in row.items() if v is not None))
    return row
