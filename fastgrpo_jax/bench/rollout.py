"""Rollout speed by concurrency and method, prefill included, interleaved repeats.

Methods: plain_nodrop (finished rows are kept until all are done, as the papers' baseline does),
plain (finished rows are dropped), eagle2_fixed (one deterministic tree at every concurrency),
fastgrpo (tree by live concurrency, shared noise), beg_mab and goodput (adaptive), ngram (chain
by live concurrency), hf_generate (transformers on CPU torch, same weights, float32; needs
torch), and any one strategy at every concurrency, such as learned:2:1:3.

Adaptive controllers keep what they have seen from one repeat to the next, as in training.
With --drafter=oracle:A, `bound_ratio` is what the best chain could reach over plain decoding if
a round cost no more than its bare forward: max over chains of E[tokens] / measured cost.

Rows come in groups; --rows=8,32 --group=8 answers 1 and 4 prompts, others in each repeat. With --lengths=forced every
row gets exactly --tokens tokens; with natural, rows end at their stop tokens.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fastgrpo_jax import base
from fastgrpo_jax.bench import common, hf_generate, players
from fastgrpo_jax.models import policy
from fastgrpo_jax.rollout import costs, decode, record


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
    common.add_drafter(parser)
    parser.add_argument("--fixed", default="learned:3:4:8", help="tree of eagle2_fixed")
    parser.add_argument("--c_peak", type=int, default=0, help="0: measured")


def run(args) -> int:
    """Run the suite."""
    methods, sizes = args.methods.split(","), common.integers(args.rows)
    bench = players.prepare(args)
    table = [row for rows in sizes for row in measure(bench, rows, methods)[0]]
    summary = {"drafter": args.drafter, "temperature": args.temperature}
    if bench.table:
        summary["c_peak"] = args.c_peak or costs.c_peak(bench.table)
    for row in table:
        summary[f"{row['method']}@{row['rows']}"] = row["ratio_vs_plain"]
    common.write(args.out, "rollout", args, bench.model, table, summary)
    return 0


def _bound(bench: players.Bench, rows: int) -> dict:
    """Find what the best chain of the oracle could gain if rounds cost their bare forward."""
    config, slots = bench.model.config, bench.limits.total + 16
    choices = (base.PLAIN, *costs.candidates("oracle", 1))
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
    bench: players.Bench, rows: int, methods, caps: tuple[int, ...] | None = None
) -> tuple[list[dict], dict[str, record.Rollout]]:
    """Time every method at one concurrency.

    Returns a row of the table for each, and each one's last rollout.
    """
    group = min(bench.args.group, rows)
    if rows % group:
        raise base.UserError(f"--rows holds {rows}; allowed: multiples of --group={group}")
    count = rows // group
    sets = [bench.prompts[i * count : (i + 1) * count] for i in range(bench.args.repeats)]
    last: dict[str, record.Rollout] = {}
    runs = {}
    for method in methods:
        if method == "hf_generate":
            runs[method] = hf_generate.player(
                bench.model, sets, group, bench.args, bench.limits.response
            )
            continue
        play = players.player(bench, method, sets, group, caps)

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

    accept = record.statistics(last).get("spec/accept_length") if last else None
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
