"""Proof that speculation changes no token: plain decoding against every drafter and plan.

Each strategy answers the same prompts at T 0 and T 1 and is compared token by token with plain
decoding by the same engine. In float64 every token must be equal. In float32 a row may part
from the plain one only at a certified near-tie: replaying the common prefix, both tokens are
the two best of the noised logits and their gap is below 3e-4.

Prompts repeat themselves, so that drafts are accepted and something is tested: the share of
each strategy's tokens that came from accepted drafts is reported. Learned drafters are trained
on the plain rollouts first; the oracle knows them and hides each token in a random sibling.
"""

import dataclasses
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.bench import common
from fastgrpo_jax.models import eagle, load
from fastgrpo_jax.rollout import (
    bandit,
    buckets,
    decode,
    draft_oracle,
    draft_vocab,
    generate,
    goodput,
    inputs,
    sampling,
    speculate,
    strategy,
)
from fastgrpo_jax.rollout import engine as engine_lib

GAP = {"float32": 3e-4, "bfloat16": 0.25}  # largest gap of a certified near-tie
SHARPEN = 5.0  # of tiny's head: at T 1 rows differ, yet repeat themselves enough for n-grams
# Each text goes round and round, so that the model goes on so even at T 1.
TEXTS = (
    "one two three four " * 10,
    "red, green, blue, " * 10,
    "A B C D E F G H " * 5,
    "10 20 30 40 50 " * 6,
)


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--dtype", default="float64", choices=("float64", "float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each temperature")
    parser.add_argument("--group", type=int, default=8, help="rollouts of each prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each rollout")
    parser.add_argument("--cases", default="", help="only these, comma-separated; empty: all")
    parser.add_argument("--train_steps", type=int, default=60, help="drafter steps first")


class Case(NamedTuple):
    """One way of decoding that is compared with plain decoding."""

    name: str
    kind: str  # of the learned drafter, and how many depths it reads
    shared_noise: bool
    controller: strategy.Controller
    plan: str  # of buckets
    few_ids: bool = False  # draft from two thirds of the ids that are emitted
    last_first: bool = False  # where rows wait for a seat, the last prompts are admitted first
    rejection: bool = False  # verified by rejection: equal tokens at T 0 alone


def cases() -> list[Case]:
    """List what is compared: all drafters, chains and trees, switching, two bucket plans."""

    def fixed(text):
        return strategy.constant(text, strategy.parse(text))

    switching = strategy.cycle(
        tuple(
            map(
                strategy.parse,
                ("learned:3:3:8", "off", "oracle:2:3:7", "learned:3:1:4@2", "ngram:4:1:5"),
            )
        )
    )
    arms = tuple(
        map(strategy.parse, ("learned:3:1:4", "learned:3:3:8", "ngram:4:1:5", "learned:3:1:4@2"))
    )

    def cost(bucket, choice):
        return 1 + 0.05 * choice.total(bucket.rows) / bucket.rows

    adaptive = goodput.controller(lambda rows: arms, cost, goodput.Settings(explore=0.5))
    by_turns = bandit.controller(lambda rows: arms, epsilon=0.3)
    return [
        Case("fastgrpo chain", "fastgrpo", True, fixed("learned:3:1:4"), "a"),
        Case("fastgrpo tree", "fastgrpo", True, fixed("learned:3:3:8"), "a"),
        Case("fastgrpo tree without shared noise", "fastgrpo", False, fixed("learned:3:3:8"), "a"),
        Case("eagle tree", "eagle", True, fixed("learned:3:3:8"), "b"),
        Case("fastgrpo drafts shared among rows", "fastgrpo", True, fixed("learned:3:1:4@2"), "b"),
        Case("oracle drafts shared among rows", "fastgrpo", True, fixed("oracle:4:1:5@2.5"), "a"),
        Case("tree of a drafter of three depths", "fastgrpo 3", True, fixed("learned:3:3:8"), "b"),
        Case("ngram chain", "fastgrpo", True, fixed("ngram:4:1:5"), "a"),
        Case("oracle chain", "fastgrpo", True, fixed("oracle:4:1:5"), "b"),
        Case("oracle tree", "fastgrpo", True, fixed("oracle:2:3:7"), "a"),
        Case("switching", "fastgrpo", True, switching, "a"),
        Case("switching in other buckets", "fastgrpo", True, switching, "b"),
        Case("fastgrpo tree of few ids", "fastgrpo", True, fixed("learned:3:3:8"), "b", True),
        Case("goodput", "fastgrpo", True, adaptive, "b"),
        Case("beg_mab", "fastgrpo", True, by_turns, "a"),
        Case("waiting for a seat", "fastgrpo", True, switching, "c"),
        Case("waiting in another order", "fastgrpo", True, adaptive, "c", last_first=True),
        Case("rejection", "fastgrpo", True, fixed("learned:3:1:4"), "a", rejection=True),
    ]


def _chosen(names: str) -> list[Case]:
    """Choose cases by name.

    Raises:
      UserError: for a name that there is not.
    """
    there = {case.name: case for case in cases()}
    asked = names.split(",") if names else list(there)
    for name in asked:
        if name not in there:
            raise base.UserError(f"--cases holds {name!r}; allowed: {', '.join(there)}")
    return [there[name] for name in asked]


def plans(rows: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Give the bucket plans: (row ladder, slot step). In the last one rows wait for a seat."""
    return {
        "a": (buckets.row_ladder(rows, str(max(rows // 4, 1))), 128),
        "b": (buckets.row_ladder(rows, f"{max(rows // 8, 1)},{max(rows // 2, 1)}"), 48),
        "c": (buckets.row_ladder(max(rows // 3, 1)), 64),
    }


class Bench(NamedTuple):
    """The fixed parts of one run of this suite."""

    args: object
    model: load.LoadedModel
    params: base.Params
    prompts: tuple[tuple[int, ...], ...]
    limits: engine_lib.Limits
    stop: tuple[int, ...]
    engines: dict[str, engine_lib.Engine]


def run(args) -> int:
    """Run the suite; the exit code is 1 if a token differs that no near-tie explains."""
    if args.quick:
        args.prompts, args.group, args.tokens = 2, 4, 24
        args.train_steps = min(args.train_steps, 20)
    if args.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    chosen = _chosen(args.cases)
    bench = _open(args)
    drafters: dict[str, tuple] = {}
    rows, plain = [], {}
    for temperature in (0.0, 1.0):
        _, plain[temperature] = _decode(bench, None, {}, plain, temperature)
    for name in sorted({case.kind for case in chosen}):
        model = bench.model._replace(
            config=dataclasses.replace(bench.model.config, dtype="float32"),
            params=jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), bench.params),
        )
        kind, _, depths = name.partition(" ")
        shape = eagle.config_for(model.config, kind, int(depths or 1))
        batches = [part for batch in plain.values() for part in common.groups(batch, args.group)]
        config, params, loss = common.quick_drafter(
            model, shape, batches, args.train_steps, args.seed, args.group
        )
        common.say(f"trained the {name} drafter: loss {loss:.3f}")
        drafters[name] = (dataclasses.replace(config, dtype=args.dtype), params)
    for temperature in (0.0, 1.0):
        for case in chosen:
            if case.rejection and temperature:
                continue  # the same distribution, but not the same tokens
            began = time.perf_counter()
            done, batch = _decode(bench, case, drafters, plain, temperature)
            row = {"strategy": case.name, "temperature": temperature, "buckets": case.plan}
            row |= _compare(bench, plain[temperature], batch, temperature)
            row["accepted"] = sum(int(b.report.accepted.sum()) for b in done.blocks)
            row["accepted_share"] = round(
                row["accepted"] / max(common.response_tokens(batch), 1), 3
            )
            row["seconds"] = round(time.perf_counter() - began, 1)
            rows.append(row)
            common.say(", ".join(f"{k} {v}" for k, v in row.items()))
    summary = _summarise(args, rows, len(chosen)) | {
        "distinct_rollouts": sum(len(set(map(tuple, b.tokens.tolist()))) for b in plain.values())
    }
    common.write(args.out, "lossless", args, bench.model, rows, summary)
    return int(summary["mismatched_tokens"] > 0)


def _open(args) -> Bench:
    model = common.load(args, args.dtype)
    params, stop = model.params, ()
    if args.model == "tiny":
        # Random weights give flat logits, on which nothing repeats; and let rows end early by a
        # stop token, so that buckets change.
        params = dict(params) | {"embed": params["embed"] * SHARPEN}
        stop = model.stop_tokens
    texts = [
        f"{i}. " * (i >= len(TEXTS)) + TEXTS[i % len(TEXTS)].strip() for i in range(args.prompts)
    ]
    prompts = tuple(tuple(model.tokenizer.encode(t, add_special_tokens=False)) for t in texts)
    longest = max(map(len, prompts))
    limits = engine_lib.Limits(longest, args.tokens, longest + args.tokens)
    common.check_length(model, limits)
    return Bench(args, model, params, prompts, limits, stop, {})


def _decode(bench: Bench, case, drafters, plain, temperature):
    """Answer the prompts by a case (None: plainly); returns the rollout and its batch."""
    rows = len(bench.prompts) * bench.args.group
    ladder, step = plans(rows)[case.plan if case else "a"]
    head, head_params = drafters[case.kind] if case else (None, None)
    controller = case.controller if case else common.plain()
    spec = speculate.Spec(
        bench.model.config,
        head,
        bench.args.group,
        shared_noise=case.shared_noise if case else True,
        rejection=bool(case and case.rejection),
    )
    name = case.name if case else "plain"
    if name not in bench.engines:  # both temperatures run the same programs
        made = common.engine_for(spec, ladder, bench.limits, bench.stop, [controller], step, rows)
        made.rounds = 4  # short blocks: many switches and compactions
        bench.engines[name] = made
    engine = bench.engines[name]
    weights = common.cast(speculate.Weights(bench.params, head_params), bench.args.dtype)
    weights = weights._replace(tau=jnp.float32(1))
    if case:
        known = plain[temperature]
        tokens = np.where(
            np.arange(known.tokens.shape[1]) < known.length[:, None], known.tokens, -1
        )
        oracle = draft_oracle.OracleParams(jnp.asarray(tokens, jnp.int32), jnp.float32(0.7))
        weights = weights._replace(oracle=oracle)
    if case and case.few_ids:
        counts = draft_vocab.count(row for b in plain.values() for row in base.responses(b))
        ids = draft_vocab.rank(counts, -(-2 * len(counts) // 3), bench.model.config.vocab)
        weights = decode.with_draft_vocab(weights, ids)
    places = tuple(range(len(bench.prompts)))
    expected = tuple(map(float, places)) if case and case.last_first else None
    request = inputs.Request(
        bench.prompts, places, bench.args.seed, int(10 * temperature), expected
    )
    settings = inputs.Settings(temperature)
    done = generate.rollout(engine, weights, request, settings, bench.limits, controller)
    return done, done.batch


def _compare(bench: Bench, plain: base.RolloutBatch, other: base.RolloutBatch, temperature) -> dict:
    """Count tokens compared, rows that part, and tokens that no near-tie explains."""
    compared = mismatched = parted = 0
    gap_max = 0.0
    for row in range(plain.length.shape[0]):
        start = int(plain.prompt_length[row])
        length = int(max(plain.length[row], other.length[row]))
        differs = np.flatnonzero(plain.tokens[row, start:length] != other.tokens[row, start:length])
        compared += length - start
        if not len(differs):
            continue
        parted += 1
        at = start + int(differs[0])
        certified, gap = _near_tie(bench, plain, other, row, at, temperature)
        if certified:
            gap_max = max(gap_max, gap)
        else:
            mismatched += len(differs)
    return {
        "rollouts": plain.length.shape[0],
        "tokens": compared,
        "mismatched_tokens": mismatched,
        "diverged_rows": parted,
        "max_tie_gap": gap_max,
    }


def _near_tie(bench: Bench, plain, other, row: int, at: int, temperature) -> tuple[bool, float]:
    """Replay a row's common prefix plainly: are both tokens the top two, and how far apart?"""
    limit = GAP.get(bench.args.dtype)
    if limit is None:
        return False, float("inf")
    tokens = jnp.asarray(plain.tokens[row : row + 1])
    logits = decode.read(bench.model.config, bench.params, tokens)[0, at - 1]
    group = bench.args.group
    key = sampling.row_keys(
        bench.args.seed,
        int(10 * temperature),
        np.asarray([row // group], np.uint64),
        np.asarray([row % group], np.uint64),
    )
    noise = sampling.gumbel(key, jnp.asarray([at]), jnp.arange(logits.shape[-1]))
    noised = sampling.perturb(logits[None], noise, jnp.asarray([temperature], jnp.float32))
    values, ids = sampling.top(noised, 2)
    gap = float(values[0, 0] - values[0, 1])
    pair = {int(plain.tokens[row, at]), int(other.tokens[row, at])}
    return set(map(int, ids[0])) == pair and gap < limit, gap


def _summarise(args, rows: list[dict], strategies: int) -> dict:
    shares = {}  # of a strategy's tokens, over its temperatures
    for name in {r["strategy"] for r in rows}:
        own = [r for r in rows if r["strategy"] == name]
        shares[name] = sum(r["accepted"] for r in own) / sum(r["tokens"] for r in own)
    return {
        "dtype": args.dtype,
        "rollouts": sum(r["rollouts"] for r in rows),
        "tokens": sum(r["tokens"] for r in rows),
        "mismatched_tokens": sum(r["mismatched_tokens"] for r in rows),
        "diverged_rows": sum(r["diverged_rows"] for r in rows),
        "max_tie_gap": max(r["max_tie_gap"] for r in rows),
        "strategies": strategies,
        "min_accepted_share": round(min(shares.values()), 3),
    }
