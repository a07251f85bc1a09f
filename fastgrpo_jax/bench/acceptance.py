"""How often the target's token is among K drafted children, on real (p, q) pairs.

p is the policy's distribution of a token at temperature T, q the drafter's at some depth of a
chain of true tokens: at depth d its last d - 1 features are its own estimates. Three ways to
draft K children of one node are compared on the same pairs:

- rejection: K draws from q without replacement, each accepted with min(1, p / q), p going on as
  its residual after a rejection (multi-round speculative sampling, SpecInfer);
- greedy: the K likeliest ids of q, and the target's own draw (EAGLE-2's trees);
- shared_noise: the K best of log q + G, under the very noise G of the target's draw.

The first and the last are means over draws (their standard error is given), the second is exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.bench import common, players, rollout
from fastgrpo_jax.rollout import decode, speculate

LOW_TV = 0.4  # pairs at most so far apart are also told apart


def add_arguments(parser) -> None:
    """Add this suite's options: those of `rollout` that make the drafter, and how many pairs."""
    rollout.add_arguments(parser)
    parser.add_argument("--widths", default="1,2,4,8", help="children, comma-separated")
    parser.add_argument("--depth", type=int, default=3, help="deepest draft")
    parser.add_argument("--pairs", type=int, default=1024, help="of each depth")
    parser.add_argument("--draws", type=int, default=8, help="of each pair")
    parser.set_defaults(rows="32", methods="learned:1:1:2", lengths="natural")


class Pairs(NamedTuple):
    """Hidden states whose heads give p and q at some places."""

    target: jax.Array  # [n, E]
    draft: jax.Array  # [n, E]


def run(args) -> int:
    """Run the suite."""
    if args.quick:
        args.pairs, args.draws, args.rows, args.depth = 32, 4, "4", 2
        args.group = min(args.group, 4)
    widths = common.integers(args.widths)
    for name in ("depth", "pairs", "draws"):
        if getattr(args, name) < 1:
            raise base.UserError(f"--{name} is {getattr(args, name)}; allowed: 1 or more")
    if args.temperature <= 0:
        raise base.UserError(f"--temperature is {args.temperature}; allowed: above 0")
    bench = players.prepare(args)
    if bench.head is None:
        raise base.UserError(f"--drafter is {args.drafter!r}; allowed: train:STEPS, random, FILE")
    batch = players.play_plain(bench, common.integers(args.rows)[0])
    rows = []
    for depth, pairs in enumerate(_pairs(bench, batch, args.depth, args.pairs, args.seed), 1):
        found = _compare(bench, pairs, widths, args)
        for subset, chosen in (("all", found["tv"] <= 1), (f"tv<={LOW_TV}", found["tv"] <= LOW_TV)):
            rows += _rows(found, chosen, depth, widths, subset)
    summary = {
        "pairs": args.pairs,
        "min_shared_minus_greedy": min(r["shared_noise"] - r["greedy"] for r in rows),
        "min_shared_minus_rejection_low_tv": min(
            (
                r["shared_noise"] - r["rejection"]
                for r in rows
                if r["subset"] != "all" and r["width"] >= 2
            ),
            default=None,
        ),
    }
    summary = {k: round(v, 4) if isinstance(v, float) else v for k, v in summary.items()}
    common.write(args.out, "acceptance", args, bench.model, rows, summary)
    return 0


def _pairs(bench, batch: base.RolloutBatch, depth: int, count: int, seed: int) -> list[Pairs]:
    """Read a rollout by the policy and, at every depth, by the drafter."""
    tokens = jnp.asarray(batch.tokens)
    read = decode.read_chain(
        bench.model.config, bench.head, speculate.learned(bench.weights), bench.weights.policy,
        tokens, depth,
    )  # fmt: skip
    # The token at place i is drawn from the feature at i - 1; the drafter speaks of it from the
    # pair at i - 2, which at depth d comes after d - 1 estimates.
    at = np.arange(tokens.shape[1])
    inside = (at >= batch.prompt_length[:, None] + depth) & (at < batch.length[:, None])
    line, place = np.nonzero(inside)
    if not len(line):
        raise base.UserError(f"no response is longer than --depth={depth}; raise --tokens")
    rng = np.random.Generator(np.random.Philox(seed))
    some = rng.permutation(len(line))[:count]
    line, place = line[some], place[some]
    return [
        Pairs(read.features[line, place - 1], hidden[line, place - 2]) for hidden in read.hidden
    ]


def _compare(bench, pairs: Pairs, widths, args, chunk: int = 32) -> dict[str, np.ndarray]:
    """Compute entropy, TV and the three acceptances [n, widths] of pairs, chunk by chunk."""
    found: dict[str, list] = {}
    for at in range(0, len(pairs.target), chunk):
        some = Pairs(*(x[at : at + chunk] for x in pairs))
        ids = jnp.arange(at, at + len(some.target), dtype=jnp.uint32)
        new = decode.compare_pairs(
            bench.weights.policy,
            some.target,
            some.draft,
            ids,
            jnp.float32(args.temperature),
            tuple(widths),
            args.draws,
        )
        for name, value in jax.device_get(new).items():
            found.setdefault(name, []).append(value)
    return {name: np.concatenate(values) for name, values in found.items()}


def _rows(found, chosen, depth: int, widths, subset: str) -> list[dict]:
    if not chosen.any():
        return []
    rows = []
    for i, width in enumerate(widths):
        row = {"width": width, "depth": depth, "subset": subset, "pairs": int(chosen.sum())}
        row |= {name: round(float(found[name][chosen].mean()), 4) for name in ("entropy", "tv")}
        for name in ("rejection", "greedy", "shared_noise"):
            values = found[name][chosen][:, i]
            row[name] = round(float(values.mean()), 4)
            row[f"{name}_error"] = round(float(values.std() / len(values) ** 0.5), 4)
        rows.append(row)
        common.say("  ".join(f"{k} {v}" for k, v in row.items() if not k.endswith("_error")))
    return rows
