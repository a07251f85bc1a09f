"""The rollouts of a run, as its config asks for them: controller, engine, weights, memory."""

import functools
import pathlib

import jax
import jax.numpy as jnp

from fastgrpo_jax import base, hosts, sharding
from fastgrpo_jax.rollout import (
    bandit,
    buckets,
    calibrate,
    corpus,
    costs,
    decode,
    draft_ngram,
    draft_vocab,
    goodput,
    speculate,
    strategy,
)
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.train import check, metrics, step
from fastgrpo_jax.train import setup as setup_lib


def needs_costs(c) -> bool:
    """Say whether the controller goes by a measured cost table."""
    r = c.rollout
    return r.controller in ("beg_mab", "goodput") or (r.controller == "fastgrpo" and not r.c_peak)


def cost_table(
    c, setup: setup_lib.Setup, state: base.TrainState, path: pathlib.Path
) -> costs.Table:
    """Read the run's cost table, or measure it at the run's first start.

    It stays with the run, so that a resumed one decides as one that was never stopped.
    """
    table = hosts.from_first(lambda: costs.load(path))
    if table is not None:
        if table.device != calibrate.device():
            metrics.say(f"warning: {path} is of another machine ({table.device})")
        return table
    about = f"{setup.model.config} {setup.eagle} {c.drafter.vocab}"
    kept = calibrate.place(c.compilation_cache, about)
    table = hosts.from_first(lambda: costs.load(kept) if kept else None)
    if table is None:
        budget_s = c.rollout.measure_seconds
        metrics.say(f"measuring what rounds cost here, for about {budget_s:.0f} s")
        table = calibrate.measure(
            setup.model.config,
            setup.eagle,
            weights(c, setup, state, {}),
            budget_s=budget_s,
            agree=agree,
        )
        if kept and hosts.first():
            costs.save(kept, table)
    if hosts.first():
        costs.save(path, table)
    return table


def agree(mine):
    """Take the first process's value, such as of a clock."""
    return hosts.exchange(mine)[0]


def controller(c, setup: setup_lib.Setup, table: costs.Table | None) -> strategy.Controller:
    """Make the controller that the config names; `table` where it `needs_costs`."""
    r, devices = c.rollout, sharding.shards(setup.model.config.mesh)
    if r.controller == "off":
        return strategy.constant("off", base.PLAIN)
    if r.controller == "fixed":
        return strategy.constant("fixed", check.one_strategy(c, "rollout.strategy", r.strategy))
    if r.controller == "fastgrpo":
        return strategy.fastgrpo(
            (r.c_peak or costs.c_peak(table)) * devices,
            n_max=r.n_max,
            depth_max=r.depth_max,
            width_max=r.width_max,
            alpha=r.alpha,
            drafter="ngram" if setup.eagle is None else "learned",
        )

    def cost(bucket, choice):
        own = base.Bucket(bucket.rows // devices, bucket.slots)  # all devices work side by side
        return costs.seconds(table, own, choice)

    given, frozen = check.strategies(c), r.timing == "frozen"
    arms = _arms(c, setup, table)
    if r.controller == "beg_mab":
        arms = bandit.by_tokens(given) if given else arms
        return bandit.controller(arms, cost=cost if frozen else None)
    settings = goodput.Settings(explore=r.explore, frozen=frozen)
    return goodput.controller((lambda rows: given) if given else arms, cost, settings)


def _arms(c, setup: setup_lib.Setup, table: costs.Table):
    drafters = ("ngram",) if setup.eagle is None else ("learned", "ngram")
    chains = c.rollout.verify == "rejection"
    devices = sharding.shards(setup.model.config.mesh)

    def fits(s: base.DraftStrategy) -> bool:  # a share would carry tokens from device to device
        return (s.drawn or not chains) and (devices == 1 or not s.share)

    return functools.cache(
        lambda rows: tuple(s for s in costs.arms(table, rows // devices, drafters) if fits(s))
    )


def engine(c, setup: setup_lib.Setup, controller: strategy.Controller) -> engine_lib.Engine:
    """Lay out the rollout engine for what a controller may choose."""
    r = c.rollout
    total = c.task.prompts_per_step * c.task.group
    devices = sharding.shards(setup.model.config.mesh)
    rows = buckets.row_ladder(min(total, r.max_rows or total), r.row_buckets, devices)
    choices = [choice for size in rows for choice in controller.possible(size)]
    draft_vocab.check(c.drafter.vocab, choices, "drafter.vocab")
    if r.verify == "rejection":
        _check_chains(c, choices)
    spec = speculate.Spec(
        policy=setup.model.config,
        eagle=setup.eagle,
        group=c.task.group,
        shared_noise=r.draft_noise == "shared",
        rejection=r.verify == "rejection",
        ngram_longest=r.ngram_max,
        depth_max=max(1, *(choice.depth for choice in choices)),
        prefill_chunk=r.prefill_chunk,
    )
    made = engine_lib.make_engine(
        spec,
        rows=rows,
        total=total,
        limits=limits(c, setup),
        stop_tokens=check.stop_tokens(c.sampling.stop_tokens, setup.model),
        slot_step=r.slot_step,
        rounds=r.block_rounds,
        span=max(choice.span for choice in choices),
    )
    made.pool.limit, made.partial = r.max_programs, r.segment > 0
    halves = spot_meshes(c, setup)
    return engine_lib.with_tail(made, halves[0], c.drafter.spot_rows) if halves else made


def limits(c, setup: setup_lib.Setup) -> engine_lib.Limits:
    """Take the run's limits; a row that goes on from an earlier step begins anywhere."""
    whole = setup.limits
    return whole._replace(prompt=whole.total - 1) if c.rollout.segment else whole


def spot_meshes(c, setup: setup_lib.Setup) -> tuple | None:
    """Split the mesh for a rollout's last rows and for the drafter's training beside them, if it
    trains and the mesh allows it."""
    wanted = c.drafter.spot and setup.step.eagle and c.drafter.replay_tokens
    return sharding.split(setup.model.config.mesh) if wanted else None


def _check_chains(c, choices) -> None:
    if c.rollout.draft_noise == "off":
        raise base.UserError(
            "rollout.verify is 'rejection', but rollout.draft_noise is 'off': drafts that are not "
            "drawn cannot be verified so; allowed: draft_noise=shared"
        )
    for choice in choices:
        if not choice.drawn:
            raise base.UserError(
                f"rollout.verify is 'rejection', but rollout.controller {c.rollout.controller!r} "
                f"may choose {choice}, which is no whole chain; "
                "allowed: strategies of width 1 without a share"
            )


def weights(
    c, setup: setup_lib.Setup, state: base.TrainState, counts: dict[str, int]
) -> speculate.Weights:
    """Give a rollout its weights: cast to a narrower compute dtype, and brought into the
    rollout's layout, in one program once per rollout.

    `counts` of the tokens emitted so far rank the draft vocabulary.
    """
    dtype, adapted = jnp.dtype(setup.model.config.dtype), setup.step.lora
    policy, drafter = step.merged(adapted, state) if adapted else state.params, state.drafter
    mesh = setup.model.config.mesh
    kinds = {x.dtype for x in jax.tree.leaves((policy, drafter))}
    if kinds != {dtype} or sharding.gathers(mesh):
        policy, drafter = decode.cast((policy, drafter), dtype, mesh)
    tau = sharding.put(mesh, jnp.float32(c.rollout.draft_tau))
    made = speculate.Weights(policy, drafter, None, tau)
    size, vocab = c.drafter.vocab, setup.model.config.vocab
    if setup.eagle is None or not 0 < size < vocab:
        return made
    ids = draft_vocab.rank(counts, size, vocab, setup.model.stop_tokens)
    return decode.with_draft_vocab(made, ids, mesh)


def looks_back(c, engine: engine_lib.Engine, controller: strategy.Controller) -> bool:
    """Say whether earlier answers to a prompt are of use: to the n-gram drafter alone."""
    possible = [choice for rows in engine.rows for choice in controller.possible(rows)]
    return c.rollout.ngram_earlier > 0 and any(x.drafter == "ngram" for x in possible)


def recall(c, engine: engine_lib.Engine, said: corpus.Corpus, prompts) -> draft_ngram.Earlier:
    """Lay out earlier answers to the prompts of a rollout."""
    r = c.rollout
    earlier = corpus.recall(
        said, prompts, answers=r.ngram_earlier, tail=r.ngram_max, width=engine.max_length
    )
    return sharding.put(engine.spec.policy.mesh, earlier)


def remember(c, said: corpus.Corpus, prompts, batch: base.RolloutBatch) -> corpus.Corpus:
    """Add a finished rollout's answers to the earlier ones."""
    r = c.rollout
    return corpus.learn(
        said, prompts, base.responses(batch), answers=r.ngram_earlier, tokens=r.ngram_memory
    )
