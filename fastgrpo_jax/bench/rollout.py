"""Rollout speed by concurrency and method, prefill included, interleaved repeats.

Methods: plain_nodrop (finished rows are kept until all are done, as the papers' baseline does),
plain (finished rows are dropped), eagle2_fixed (one deterministic tree at every concurrency),
fastgrpo (tree by live concurrency, shared noise), ngram (chain by live concurrency), and
hf_generate (transformers on CPU torch, same weights, float32; needs torch).

Rows come in groups; --rows=8,32 --group=8 answers 1 and 4 prompts. With --lengths=forced every
row gets exactly --tokens tokens; with natural, rows end at their stop tokens.
"""

import dataclasses
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.bench import common, hf_generate
from fastgrpo_jax.models import eagle, load
from fastgrpo_jax.rollout import buckets, calibrate, decode, draft_oracle, generate, strategy
from fastgrpo_jax.train import data

METHODS = ("plain_nodrop", "plain", "eagle2_fixed", "fastgrpo", "ngram", "hf_generate")
SPECULATIVE = ("eagle2_fixed", "fastgrpo", "ngram")


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--rows", default="1,8,32", help="concurrencies, comma-separated")
    parser.add_argument("--methods", default="plain_nodrop,plain,eagle2_fixed,fastgrpo,ngram")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt, at most rows")
    parser.add_argument("--tokens", type=int, default=64, help="response tokens, at most")
    parser.add_argument("--lengths", default="forced", choices=("forced", "natural"))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--task", default="arithmetic", help="arithmetic, addition or FILE.jsonl")
    parser.add_argument(
        "--max_prompt", type=int, default=96, help="tokens; longer ones are skipped"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--drafter",
        default="train:40",
        help="train:STEPS (on this policy's own rollouts), random, or oracle:ACCEPTANCE",
    )
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
    c_peak: int


def run(args) -> int:
    """Run the suite."""
    if args.quick:
        args.repeats, args.tokens = 2, min(args.tokens, 16)
        args.drafter = "random" if args.drafter.startswith("train") else args.drafter
    methods = args.methods.split(",")
    for name in methods:
        if name not in METHODS:
            raise base.UserError(f"--methods holds {name!r}; allowed: {', '.join(METHODS)}")
    if "hf_generate" in methods and importlib.util.find_spec("torch") is None:
        raise base.UserError(
            "--methods=hf_generate needs torch: pip install 'fastgrpo-jax[parity]'"
        )
    accept = args.drafter.removeprefix("oracle:")
    if args.drafter != accept and not accept.replace(".", "", 1).isdecimal():
        raise base.UserError(f"--drafter is {args.drafter!r}; allowed: oracle:0.8 and the like")
    if not 0 <= args.temperature < float("inf"):
        raise base.UserError(f"--temperature is {args.temperature}; allowed: 0 or more")
    sizes = common.integers(args.rows)
    bench = _open(args, sizes, methods)
    table = []
    for rows in sizes:
        table += _measure(bench, rows, methods)
    summary = {"c_peak": bench.c_peak, "drafter": args.drafter, "temperature": args.temperature}
    for row in table:
        summary[f"{row['method']}@{row['rows']}"] = row["ratio_vs_plain"]
    common.write(args.out, "rollout", args, bench.model, table, summary)
    return 0


def _open(args, sizes, methods) -> Bench:
    model = load.load(args.model, args.dtype, args.seed)
    count = max(-(-rows // min(args.group, rows)) for rows in sizes)
    task = data.open_task(args.task, seed=args.seed, shuffle=False, max_operand=20, max_terms=5)
    prompts = common.chat_prompts(model, task, count, args.max_prompt)
    longest = max(map(len, prompts))
    limits = generate.Limits(longest, args.tokens, longest + args.tokens)
    weights = decode.Weights(jax.tree.map(jnp.asarray, model.params))
    bench = Bench(args, model, prompts, limits, None, weights, args.c_peak)
    drafts = [m for m in methods if m in SPECULATIVE]
    if not drafts:
        return bench
    if not bench.c_peak and {"fastgrpo", "ngram"} & set(drafts):
        bench = bench._replace(c_peak=calibrate.c_peak(model.config, weights))
        common.say(f"C_peak {bench.c_peak}")
    if set(drafts) == {"ngram"} or args.drafter.startswith("oracle:"):
        return bench
    head, params = _drafter(bench)
    weights = weights._replace(eagle=params, tau=jnp.float32(1))
    return bench._replace(head=head, weights=weights)


def _drafter(bench: Bench) -> tuple[base.EagleConfig, base.Params]:
    """Make the learned drafter: random, or trained on the policy's own rollouts."""
    args = bench.args
    if args.drafter == "random":
        config = eagle.config_for(bench.model.config, args.kind)
        return config, eagle.init(jax.random.key(args.seed + 1), config)
    word, _, steps = args.drafter.partition(":")
    if word != "train" or not steps.isdigit():
        raise base.UserError(
            f"--drafter is {args.drafter!r}; allowed: train:STEPS, random, oracle:ACCEPTANCE"
        )
    count = 8  # groups of eight, of other prompts of the task
    task = data.open_task(args.task, seed=args.seed + 1, shuffle=False, max_operand=20, max_terms=5)
    prompts = common.chat_prompts(bench.model, task, count, bench.limits.prompt)
    played = _player(bench, "plain", count * 8, prompts, 8)(1000).batch
    batches = common.groups(played, 8)
    config, params, loss = common.train_drafter(
        bench.model, args.kind, batches, int(steps), args.temperature, args.seed, 8
    )
    common.say(f"trained the drafter for {steps} steps on {count} prompts: loss {loss:.3f}")
    return config, params


def _controller(bench: Bench, method: str, drafter: str) -> strategy.Controller:
    if method in ("plain", "plain_nodrop"):
        return common.plain()
    if method == "eagle2_fixed":
        fixed = strategy.parse(bench.args.fixed)
        return strategy.constant(method, dataclasses.replace(fixed, drafter=drafter))
    return strategy.fastgrpo(
        bench.c_peak, n_max=160, depth_max=5, width_max=8, alpha=0.75, drafter=drafter
    )


def _oracle_controller(bench: Bench, method: str) -> strategy.Controller:
    """Give the oracle, whose trees are fans, a chain as long as the method's tree is deep."""
    inner = _controller(bench, method, "learned")

    def swap(rows):
        chosen = inner.choose(rows, 0)
        if not chosen.depth:
            return chosen
        return base.DraftStrategy("oracle", chosen.depth, 1, chosen.depth + 1)

    return strategy.Controller(method, lambda rows, block: swap(rows), lambda rows: (swap(rows),))


def _player(
    bench: Bench, method: str, rows: int, prompts, group: int
) -> Callable[[int], generate.Rollout]:
    """Make the function that runs one rollout of a method; its argument varies the noise."""
    args = bench.args
    oracle = args.drafter.startswith("oracle:") and method in ("eagle2_fixed", "fastgrpo")
    drafter = "ngram" if method == "ngram" else "learned"
    controller = (
        _oracle_controller(bench, method) if oracle else _controller(bench, method, drafter)
    )
    learned = drafter == "learned" and method in SPECULATIVE and not oracle
    spec = decode.Spec(
        bench.model.config,
        bench.head if learned else None,
        group,
        shared_noise=method != "eagle2_fixed",
    )
    ladder = buckets.row_ladder(len(prompts) * group)
    stop = () if args.lengths == "forced" else bench.model.stop_tokens
    step = bench.limits.total if method.startswith("plain") else bench.limits.total + 16
    engine = common.engine_for(spec, ladder, bench.limits, stop, [controller], step)
    engine.keep_finished = method == "plain_nodrop"
    weights = bench.weights if learned else bench.weights._replace(eagle=None)

    plain = _player(bench, "plain", rows, prompts, group) if oracle else None

    def play(noise: int) -> generate.Rollout:
        request = generate.Request(prompts, tuple(range(len(prompts))), args.seed, noise)
        settings = generate.Settings(args.temperature)
        used = weights
        if oracle:
            known = plain(noise).batch
            accept = jnp.float32(float(args.drafter.partition(":")[2]))
            tokens = np.where(
                np.arange(known.tokens.shape[1]) < known.length[:, None], known.tokens, -1
            )
            used = weights._replace(oracle=draft_oracle.OracleParams(jnp.asarray(tokens), accept))
        return generate.rollout(engine, used, request, settings, bench.limits, controller)

    return play


def _measure(bench: Bench, rows: int, methods) -> list[dict]:
    """Time every method at one concurrency; one row of the table each."""
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
        play = _player(bench, method, rows, prompts, group)

        def timed(noise: int, play=play, method=method) -> float:
            """Play until nothing compiles: the same noise takes the same buckets again."""
            done = play(noise)
            while done.compiled:
                done = play(noise)
            last[method] = done
            seconds = done.prefill_seconds + done.decode_seconds
            return common.response_tokens(done.batch) / seconds

        runs[method] = timed
    found = common.interleave(runs, bench.args.repeats)
    return [_row(rows, method, found, last.get(method)) for method in methods]


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
