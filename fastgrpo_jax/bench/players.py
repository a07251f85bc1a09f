"""What `rollout` and its kin compare: methods of answering prompts, each as a function to time."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.bench import common
from fastgrpo_jax.models import eagle, eagle_file
from fastgrpo_jax.models import load as load_lib
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
    inputs,
    record,
    speculate,
    strategy,
)
from fastgrpo_jax.rollout import engine as engine_lib

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


class Bench(NamedTuple):
    """The fixed parts of one run of this suite."""

    args: Any
    model: load_lib.LoadedModel
    prompts: tuple[tuple[int, ...], ...]
    limits: engine_lib.Limits
    head: base.EagleConfig | None
    weights: speculate.Weights
    table: costs.Table | None
    accept: float | None  # of the oracle, where it drafts

    @property
    def drafters(self) -> tuple[str, ...]:
        """Name the drafters that adaptive controllers choose from."""
        if self.accept is not None:
            return ("oracle",)
        return ("learned", "ngram") if self.head else ("ngram",)


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
        common.say(costs.describe(table(bench), sizes, bench.drafters))
    return bench


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
    count = max(-(-rows // min(args.group, rows)) for rows in sizes) * args.repeats
    prompts = common.chat_prompts(
        model, common.open_task(args.task, args.seed), count, args.max_prompt
    )
    longest = max(map(len, prompts))
    limits = engine_lib.Limits(longest, args.tokens, longest + args.tokens)
    common.check_length(model, limits)
    weights = speculate.Weights(jax.tree.map(jnp.asarray, model.params))
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
    return bench._replace(table=table(bench))


def _strategy(name: str) -> base.DraftStrategy:
    """Read a method that is a strategy."""
    try:
        return strategy.parse(name)
    except base.UserError as error:
        raise base.UserError(
            f"--methods holds {name!r}; allowed: {', '.join(METHODS)}, or drafter:depth:width:nodes"
        ) from error


def table(bench: Bench) -> costs.Table:
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
        config = common.shape_of(args, bench.model.config)
        return config, eagle.init(jax.random.key(args.seed + 1), config), {}
    if args.drafter.endswith(".safetensors"):
        config, params, counts = eagle_file.load(args.drafter, bench.model.config)
        return config, jax.tree.map(jnp.asarray, params), counts
    count, steps = 8, int(args.drafter.partition(":")[2])  # groups of eight, of other prompts
    task = common.open_task(args.task, args.seed + 1)
    prompts = common.chat_prompts(bench.model, task, count, bench.limits.prompt)
    played = player(bench, "plain", (prompts,), 8)(1000).batch
    batches = common.groups(played, 8)
    shape = common.shape_of(args, bench.model.config)
    config, params, loss = common.quick_drafter(bench.model, shape, batches, steps, args.seed, 8)
    common.say(f"trained the drafter for {steps} steps on {count} prompts: loss {loss:.3f}")
    return config, params, draft_vocab.count(base.responses(played))


def player(
    bench: Bench, method: str, sets, group: int, caps: tuple[int, ...] | None = None
) -> Callable[[int], record.Rollout]:
    """Make the function that runs one rollout of a method.

    Its argument varies the noise, and takes the sets of prompts, equally many in each, in turn.
    `caps` are response limits of the rows, where they differ.
    """
    args = bench.args
    controller = _controller(bench, method)
    total = len(sets[0]) * group
    ladder = buckets.row_ladder(min(args.max_rows or total, total))
    choices = [s for rows in ladder for s in controller.possible(rows)]
    used = {s.drafter for s in choices}
    draft_vocab.check(args.vocab, choices, "--vocab")
    rejection = args.verify == "rejection"
    if rejection and any(not s.drawn for s in choices):
        raise base.UserError(
            f"--verify is 'rejection' and --methods holds {method!r}, which drafts other than whole chains"
        )
    spec = speculate.Spec(
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
    plain = player(bench, "plain", sets, group, caps) if "oracle" in used else None
    looks_back = "ngram" in used and args.earlier
    earlier = functools.cache(lambda i: _earlier(bench, sets[i], group, spec.ngram_longest))
    memory: strategy.Memory = {}

    def play(noise: int) -> record.Rollout:
        nonlocal memory
        turn = noise % len(sets)
        prompts = sets[turn]
        places = tuple(turn * len(prompts) + i for i in range(len(prompts)))
        request = inputs.Request(prompts, places, args.seed, noise, caps=caps)
        known = weights._replace(earlier=earlier(turn)) if looks_back else weights
        if plain:
            known = known._replace(oracle=_answers(plain(noise).batch, bench.accept))
        settings = inputs.Settings(args.temperature)
        done = generate.rollout(
            engine, known, request, settings, bench.limits, controller, memory=memory
        )
        memory = done.memory
        return done

    return play


def _controller(bench: Bench, method: str) -> strategy.Controller:
    if method in PLAIN:
        return common.plain()
    if method not in METHODS:
        return strategy.constant(method, _strategy(method))
    args, table = bench.args, bench.table
    chains = args.verify == "rejection"
    arms = functools.cache(
        lambda rows: tuple(
            s for s in costs.arms(table, rows, bench.drafters) if s.drawn or not chains
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


def _earlier(bench: Bench, prompts, group: int, tail: int) -> draft_ngram.Earlier:
    """Answer the prompts before, as an earlier epoch of a training would have."""
    play, known = player(bench, "plain", (prompts,), group), {}
    bounds = {"answers": bench.args.earlier, "tokens": 2**31}
    for i in range(-(-bench.args.earlier // group)):
        known = corpus.learn(known, prompts, base.responses(play(2000 + i).batch), **bounds)
    return corpus.recall(
        known, prompts, answers=bench.args.earlier, tail=tail, width=bench.limits.total
    )


def play_plain(bench: Bench, rows: int) -> base.RolloutBatch:
    """Answer prompts plainly, `rows` rows in all."""
    group = min(bench.args.group, rows)
    return player(bench, "plain", (bench.prompts[: rows // group],), group)(0).batch


def _answers(batch: base.RolloutBatch, accept: float) -> draft_oracle.OracleParams:
    """Tell the oracle what plain decoding says."""
    known = np.arange(batch.tokens.shape[1]) < batch.length[:, None]
    tokens = jnp.asarray(np.where(known, batch.tokens, -1))
    return draft_oracle.OracleParams(tokens, jnp.float32(accept))
