"""From a config to the typed parts of a run. The config object ends here and in the loop.

Everything that can be refused is refused here, before any work: numbers first, then data and
rewards, then the model.
"""

import functools
import hashlib
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle, eagle_file, load
from fastgrpo_jax.rollout import (
    bandit,
    buckets,
    corpus,
    costs,
    decode,
    draft_ngram,
    draft_vocab,
    generate,
    goodput,
    strategy,
)
from fastgrpo_jax.train import data, distill, grpo, optim, rewards, tasks
from fastgrpo_jax.train import step as step_lib


class Setup(NamedTuple):
    """All parts of a run, made from its config."""

    model: load.LoadedModel
    eagle: base.EagleConfig | None
    drafter: base.Params  # to start from; None: none, or drawn from the seed
    counts: dict[str, int]  # of the token ids that a drafter to start from was trained on
    source: str  # fingerprint of the data and of the rewards' files, to notice a change
    task: data.Task
    rendering: data.Rendering
    rewards: tuple[rewards.Reward, ...]
    limits: generate.Limits
    sampling: generate.Settings
    step: step_lib.StepConfig


class Losses(NamedTuple):
    """What the train step needs of the config alone."""

    loss: grpo.LossConfig
    optim: optim.OptimConfig
    drafter_optim: optim.OptimConfig
    distill: distill.DistillConfig


def prepare(c) -> Setup:
    """Check a config and make all parts of its run; reads the data and the model.

    Raises:
      UserError: naming the field, its value and what is allowed.
    """
    check_numbers(c)
    losses = _losses(c)
    _strategy(c, "rollout.strategy", c.rollout.strategy)
    _strategies(c)
    task = data.open_task(
        c.task.name,
        seed=c.seed,
        shuffle=c.task.shuffle,
        max_operand=c.task.max_operand,
        max_terms=c.task.max_terms,
    )
    functions = rewards.load_rewards(c.reward.functions, c.reward.weights)
    model = load.load(c.model.name, c.model.dtype, c.seed, c.model.attention)
    head, drafter, counts = _drafter(c, model.config)
    rendering = data.Rendering(
        model.tokenizer,
        c.task.system,
        c.task.chat,
        c.task.max_prompt_length,
        c.task.overlong_prompt,
    )
    _stop_tokens(c.sampling.stop_tokens, model)
    buckets.row_ladder(c.task.prompts_per_step * c.task.group, c.rollout.row_buckets)
    _check_rows(c, task, rendering, functions)
    limits = _limits(c, model.config)
    return Setup(
        model=model,
        eagle=head,
        drafter=drafter,
        counts=counts,
        source=_fingerprint(c, task, functions),
        task=task,
        rendering=rendering,
        rewards=functions,
        limits=limits,
        sampling=generate.Settings(c.sampling.temperature, c.sampling.top_k, c.sampling.top_p),
        step=step_lib.StepConfig(
            policy=model.config,
            eagle=head if c.drafter.train else None,
            max_response=limits.response,
            max_prompt=limits.prompt,
            group=c.task.group,
            head_chunk=c.loss.head_chunk,
            micro_batches=c.optim.micro_batches,
            remat=c.optim.remat,
            **losses._asdict(),
        ),
    )


_CHECKED_ROWS = 20_000  # of a finite source, at start


def _check_rows(c, task: data.Task, rendering: data.Rendering, functions) -> None:
    """Render the rows that the run will come to, so that a bad one is answered at start."""
    first = data.take(task, 0, 1, rendering)[0][0]
    rewards.check_columns(functions, first.columns)
    numeric = any(reward.fn is rewards.exact_number for reward in functions)
    for place in range(min(task.size or 1, c.steps * c.task.prompts_per_step, _CHECKED_ROWS)):
        if c.task.overlong_prompt == "error":
            data.take(task, place, 1, rendering)
        answer = task.row(place).get("answer")
        if numeric and answer is not None and tasks.to_number(answer) is None:
            raise base.UserError(
                f"the row at place {place} of {task.name} has the answer {answer!r}, which is no "
                "number, and reward.functions holds exact_number; mend the row, or leave it empty"
            )


def _fingerprint(c, task: data.Task, functions: tuple[rewards.Reward, ...]) -> str:
    """Hash what a run reads beside its config: the rows (some, of a large source), the rewards."""
    digest = hashlib.sha256(f"{task.name} {task.size}".encode())
    if task.size:
        for place in range(0, task.size, max(task.size // 1000, 1)):
            digest.update(repr(task.row(place)).encode())
    for spec, reward in zip(c.reward.functions.split(","), functions):
        digest.update(reward.name.encode())
        path = spec.strip().rpartition(":")[0]
        if path.endswith(".py"):
            digest.update(pathlib.Path(path).read_bytes())
    return digest.hexdigest()[:16]


def _drafter(
    c, policy: base.PolicyConfig
) -> tuple[base.EagleConfig | None, base.Params, dict[str, int]]:
    """Shape the drafter, and read its file if there is one."""
    kind, path = c.drafter.kind, c.drafter.init
    if path and kind == "none":
        raise base.UserError(f"drafter.init is {path!r}, but drafter.kind is 'none'")
    if not path:
        return (None if kind == "none" else eagle.config_for(policy, kind)), None, {}
    head, params, counts = eagle_file.load(path, policy)
    if head.kind != kind:
        raise base.UserError(f"drafter.kind is {kind!r}, but {path!r} holds one of {head.kind!r}")
    return head, params, counts


def first_state(c, setup: Setup) -> base.TrainState:
    """Make the state before the first step: the loaded policy; the drafter loaded or drawn."""
    drafter = setup.drafter
    if setup.eagle is not None and drafter is None:
        drafter = eagle.init(jax.random.key(c.seed + 1), setup.eagle)
    return step_lib.init_state(setup.step, setup.model.params, drafter)


def needs_costs(c) -> bool:
    """Say whether the controller goes by a measured cost table."""
    r = c.rollout
    return r.controller in ("beg_mab", "goodput") or (r.controller == "fastgrpo" and not r.c_peak)


def controller(c, setup: Setup, table: costs.Table | None) -> strategy.Controller:
    """Make the controller that the config names; `table` where it `needs_costs`."""
    r = c.rollout
    if r.controller == "off":
        return strategy.constant("off", base.PLAIN)
    if r.controller == "fixed":
        return strategy.constant("fixed", _strategy(c, "rollout.strategy", r.strategy))
    if r.controller == "fastgrpo":
        return strategy.fastgrpo(
            r.c_peak or costs.c_peak(table),
            n_max=r.n_max,
            depth_max=r.depth_max,
            width_max=r.width_max,
            alpha=r.alpha,
            drafter="ngram" if setup.eagle is None else "learned",
        )

    def cost(bucket, choice):
        return costs.seconds(table, bucket, choice)

    given, frozen = _strategies(c), r.timing == "frozen"
    arms = _arms(c, setup, table)
    if r.controller == "beg_mab":
        arms = bandit.by_tokens(given) if given else arms
        return bandit.controller(arms, cost=cost if frozen else None)
    settings = goodput.Settings(explore=r.explore, frozen=frozen)
    return goodput.controller((lambda rows: given) if given else arms, cost, settings)


def _arms(c, setup: Setup, table: costs.Table):
    drafters = ("ngram",) if setup.eagle is None else ("learned", "ngram")
    chains = c.rollout.verify == "rejection"
    return functools.cache(
        lambda rows: tuple(s for s in costs.arms(table, rows, drafters) if s.chain or not chains)
    )


def engine(c, setup: Setup, controller: strategy.Controller) -> generate.Engine:
    """Lay out the rollout engine for what a controller may choose."""
    r = c.rollout
    total = c.task.prompts_per_step * c.task.group
    rows = buckets.row_ladder(min(total, r.max_rows or total), r.row_buckets)
    choices = [choice for size in rows for choice in controller.possible(size)]
    draft_vocab.check(c.drafter.vocab, choices, "drafter.vocab")
    if r.verify == "rejection":
        _check_chains(c, choices)
    spec = decode.Spec(
        policy=setup.model.config,
        eagle=setup.eagle,
        group=c.task.group,
        shared_noise=r.draft_noise == "shared",
        rejection=r.verify == "rejection",
        ngram_longest=r.ngram_max,
        depth_max=max(1, *(choice.depth for choice in choices)),
        prefill_chunk=r.prefill_chunk,
    )
    made = generate.make_engine(
        spec,
        rows=rows,
        total=total,
        limits=setup.limits,
        stop_tokens=_stop_tokens(c.sampling.stop_tokens, setup.model),
        slot_step=r.slot_step,
        rounds=r.block_rounds,
        span=max(choice.span for choice in choices),
    )
    made.pool.limit = r.max_programs
    return made


def _check_chains(c, choices) -> None:
    if c.rollout.draft_noise == "off":
        raise base.UserError(
            "rollout.verify is 'rejection', but rollout.draft_noise is 'off': drafts that are not "
            "drawn cannot be verified so; allowed: draft_noise=shared"
        )
    for choice in choices:
        if choice.depth and not choice.chain:
            raise base.UserError(
                f"rollout.verify is 'rejection', but rollout.controller {c.rollout.controller!r} "
                f"may choose {choice}, which is no chain; allowed: strategies of width 1"
            )


def weights(c, setup: Setup, state: base.TrainState, counts: dict[str, int]) -> decode.Weights:
    """Give a rollout its weights; a narrower compute dtype is cast to once per rollout.

    `counts` of the tokens emitted so far rank the draft vocabulary.
    """
    dtype = jnp.dtype(setup.model.config.dtype)
    policy, drafter = state.params, state.drafter
    if policy["embed"].dtype != dtype:
        policy, drafter = decode.cast((policy, drafter), dtype)
    made = decode.Weights(policy, drafter, None, jnp.float32(c.rollout.draft_tau))
    size, vocab = c.drafter.vocab, setup.model.config.vocab
    if setup.eagle is None or not 0 < size < vocab:
        return made
    ids = draft_vocab.rank(counts, size, vocab, setup.model.stop_tokens)
    return decode.with_draft_vocab(made, ids)


def looks_back(c, engine: generate.Engine, controller: strategy.Controller) -> bool:
    """Say whether earlier answers to a prompt are of use: to the n-gram drafter alone."""
    possible = [choice for rows in engine.rows for choice in controller.possible(rows)]
    return c.rollout.ngram_earlier > 0 and any(x.drafter == "ngram" for x in possible)


def recall(c, engine: generate.Engine, said: corpus.Corpus, prompts) -> draft_ngram.Earlier:
    """Lay out earlier answers to the prompts of a rollout."""
    r = c.rollout
    return corpus.recall(
        said, prompts, answers=r.ngram_earlier, tail=r.ngram_max, width=engine.max_length
    )


def remember(c, said: corpus.Corpus, prompts, batch: base.RolloutBatch) -> corpus.Corpus:
    """Add a finished rollout's answers to the earlier ones."""
    r = c.rollout
    return corpus.learn(
        said, prompts, base.responses(batch), answers=r.ngram_earlier, tokens=r.ngram_memory
    )


_POSITIVE = (
    "steps",
    "task.prompts_per_step",
    "task.max_prompt_length",
    "sampling.max_response_length",
    "rollout.n_max",
    "rollout.depth_max",
    "rollout.width_max",
    "rollout.slot_step",
    "rollout.block_rounds",
    "rollout.prefill_chunk",
    "rollout.max_programs",
    "rollout.ngram_max",
    "loss.head_chunk",
    "checkpoint.every",
    "checkpoint.keep",
)
_NOT_NEGATIVE = (
    "seed",
    "sampling.temperature",
    "sampling.top_k",
    "sampling.max_length",
    "rollout.c_peak",
    "rollout.measure_seconds",
    "rollout.max_rows",
    "rollout.warmup",
    "rollout.ngram_earlier",
    "rollout.ngram_memory",
    "drafter.vocab",
    "log.completions_per_step",
)
_CHOICES = {
    "rollout.controller": ("off", "fixed", "fastgrpo", "beg_mab", "goodput"),
    "rollout.timing": ("live", "frozen"),
    "rollout.draft_noise": ("shared", "off"),
    "rollout.verify": ("draws", "rejection"),
    "drafter.kind": (*eagle.KINDS, "none"),
    "task.overlong_prompt": data.OVERLONG,
    "reward.on_error": rewards.ON_ERROR,
}


_AT_MOST = {
    "seed": 2**31 - 2,
    "rollout.ngram_max": 32,
    "rollout.ngram_earlier": 1024,
    "rollout.depth_max": strategy.DEEPEST,
    "rollout.n_max": strategy.MOST_NODES,
    "rollout.width_max": 64,
    "rollout.warmup": 256,
}


def _value(c, field: str) -> Any:
    for part in field.split("."):
        c = c[part]
    return c


def check_numbers(c) -> None:
    """Check every number and choice that no constructor checks.

    Raises:
      UserError: naming the field, its value and what is allowed.
    """

    def refuse(field, allowed):
        raise base.UserError(f"{field} is {_value(c, field)!r}; allowed: {allowed}")

    for field in _POSITIVE:
        if _value(c, field) < 1:
            refuse(field, "1 or more")
    for field in _NOT_NEGATIVE:
        if not 0 <= _value(c, field) < float("inf"):
            refuse(field, "0 or more")
    for field in (*_POSITIVE, *_NOT_NEGATIVE):
        most = _AT_MOST.get(field, 2**31 - 1)
        if _value(c, field) > most:
            refuse(field, f"{most} at most")
    for field, allowed in _CHOICES.items():
        if _value(c, field) not in allowed:
            refuse(field, ", ".join(allowed))
    if not 0 < c.sampling.top_p <= 1:
        refuse("sampling.top_p", "above 0, at most 1")
    if not 0 <= c.rollout.explore < 1:
        refuse("rollout.explore", "0 or more, below 1")
    if c.task.group < 2:
        refuse("task.group", "2 or more, since an advantage compares the completions of a group")
    for field in ("rollout.draft_tau", "rollout.alpha"):
        if not 0 < _value(c, field) < float("inf"):
            refuse(field, "above 0")
    rows = c.task.prompts_per_step * c.task.group
    if c.optim.micro_batches < 1 or rows % c.optim.micro_batches:
        refuse(
            "optim.micro_batches",
            f"divisors of {rows}, the rows of a step (task.prompts_per_step * task.group)",
        )


def _losses(c) -> Losses:
    loss, o, d = c.loss, c.optim, c.drafter
    return Losses(
        loss=grpo.LossConfig(
            loss.name, loss.clip_low, loss.clip_high, loss.kl_beta, loss.advantage_scale
        ),
        optim=optim.OptimConfig(
            learning_rate=o.learning_rate,
            warmup_steps=o.warmup_steps,
            weight_decay=o.weight_decay,
            b1=o.b1,
            b2=o.b2,
            eps=o.eps,
            max_grad_norm=o.max_grad_norm,
        ),
        drafter_optim=optim.OptimConfig(
            learning_rate=d.learning_rate,
            b1=o.b1,
            b2=o.b2,
            max_grad_norm=d.max_grad_norm,
            section="drafter",
        ),
        distill=distill.DistillConfig(
            d.feature_weight, d.token_weight, d.token_loss, d.unroll, d.decay
        ),
    )


def _limits(c, policy: base.PolicyConfig) -> generate.Limits:
    prompt, response = c.task.max_prompt_length, c.sampling.max_response_length
    total = c.sampling.max_length or prompt + response
    if not 2 <= total <= policy.max_positions:
        raise base.UserError(
            f"the longest sequence is {total} tokens (sampling.max_length, or "
            "task.max_prompt_length + sampling.max_response_length); allowed: 2 to "
            f"{policy.max_positions}, the model's positions"
        )
    if prompt >= total:
        raise base.UserError(
            f"sampling.max_length is {total}; allowed: above task.max_prompt_length = {prompt}, "
            "so that every prompt leaves room for an answer"
        )
    return generate.Limits(prompt, min(response, total - 1), total)


def _stop_tokens(asked: str, model: load.LoadedModel) -> tuple[int, ...]:
    """Unite the model's stop tokens with those of the config, ids or texts of one token."""
    found = set(model.stop_tokens)
    for text in filter(None, asked.split(",")):
        ids = (
            [int(text)]
            if text.isascii() and text.isdigit()
            else model.tokenizer.encode(text, add_special_tokens=False)
        )
        if len(ids) == 1 and ids[0] >= model.config.vocab:
            raise base.UserError(
                f"sampling.stop_tokens holds the id {ids[0]}; allowed: below {model.config.vocab}"
            )
        if len(ids) != 1 or not 0 <= ids[0] < model.config.vocab:
            raise base.UserError(
                f"sampling.stop_tokens holds {text!r}, which is {len(ids)} tokens; allowed: ids "
                f"below {model.config.vocab}, or texts of exactly one token"
            )
        found.add(ids[0])
    return tuple(sorted(found))


def _strategies(c) -> tuple[base.DraftStrategy, ...]:
    """Read the strategies that an adaptive controller is to choose from; empty: not given."""
    given = [x.strip() for x in c.rollout.strategies.split(",") if x.strip()]
    return tuple(_strategy(c, "rollout.strategies", text) for text in given)


def _strategy(c, field: str, text: str) -> base.DraftStrategy:
    """Read a strategy and check that this run can draft by it."""
    try:
        chosen = strategy.parse(text)
    except base.UserError as error:
        raise base.UserError(f"{field}: {error}") from error
    if chosen.drafter == "oracle":
        raise base.UserError(f"{field} holds {text!r}; the oracle is for benches only")
    used = field == "rollout.strategies" or c.rollout.controller == "fixed"
    if used and chosen.drafter == "learned" and c.drafter.kind == "none":
        raise base.UserError(
            f"{field} holds {text!r}, but drafter.kind is 'none'; "
            "choose a drafter, or a strategy of the n-gram drafter such as ngram:4:1:5"
        )
    return chosen
