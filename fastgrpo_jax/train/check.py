"""Checks of a config's values: one clear error at the border, before any work is done."""

from typing import Any

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle, load, policy
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.rollout import strategy
from fastgrpo_jax.train import data, rewards


def numbers(c) -> None:
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
    if c.optim.remat.lower() not in REMATS:
        refuse("optim.remat", "none, full, dots, or false and true for the first two")
    if not 0 < c.sampling.top_p <= 1:
        refuse("sampling.top_p", "above 0, at most 1")
    if not 0 <= c.rollout.explore < 1:
        refuse("rollout.explore", "0 or more, below 1")
    if c.task.group < 2:
        refuse("task.group", "2 or more, since an advantage compares the completions of a group")
    for field in ("rollout.draft_tau", "rollout.alpha"):
        if not 0 < _value(c, field) < float("inf"):
            refuse(field, "above 0")
    if c.rollout.segment and c.task.resample_max:
        refuse("task.resample_max", "0 with rollout.segment, whose groups are answered over steps")
    response = c.sampling.max_response_length
    if c.rollout.segment >= response:
        refuse("rollout.segment", f"0 (off), or below sampling.max_response_length, {response}")
    if c.drafter.replay_updates and (c.drafter.kind == "none" or not c.drafter.train):
        refuse("drafter.replay_updates", "0 without a drafter to train")
    if c.optim.freeze and c.lora.rank:
        refuse("lora.rank", "0 with optim.freeze, under which the policy does not learn")
    if c.optim.freeze and c.loss.kl_beta:
        refuse("loss.kl_beta", "0 with optim.freeze, under which the policy does not learn")
    rows = c.task.prompts_per_step * c.task.group
    if c.optim.micro_batches < 1 or rows % c.optim.micro_batches:
        refuse(
            "optim.micro_batches",
            f"divisors of {rows}, the rows of a step (task.prompts_per_step * task.group)",
        )


REMATS = {name: name for name in policy.REMATS} | {"false": "none", "true": "full"}
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
    "drafter.spot_rows",
)
_NOT_NEGATIVE = (
    "seed",
    "task.resample_max",
    "reward.overlong_buffer",
    "reward.overlong_factor",
    "sampling.temperature",
    "sampling.top_k",
    "sampling.max_length",
    "rollout.c_peak",
    "rollout.measure_seconds",
    "rollout.max_rows",
    "rollout.segment",
    "rollout.warmup",
    "rollout.ngram_earlier",
    "rollout.ngram_memory",
    "drafter.vocab",
    "drafter.replay_updates",
    "drafter.replay_tokens",
    "optim.token_budget",
    "log.completions_per_step",
    "hosts.count",
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
    "task.resample_max": 1000,
    "rollout.ngram_max": 32,
    "rollout.ngram_earlier": 1024,
    "rollout.depth_max": strategy.DEEPEST,
    "rollout.n_max": strategy.MOST_NODES,
    "rollout.width_max": 64,
    "rollout.warmup": 256,
    "drafter.replay_updates": 10_000,
}


def _value(c, field: str) -> Any:
    for part in field.split("."):
        c = c[part]
    return c


def limits(c, model: base.PolicyConfig) -> engine_lib.Limits:
    prompt, response = c.task.max_prompt_length, c.sampling.max_response_length
    total = c.sampling.max_length or prompt + response
    if not 2 <= total <= model.max_positions:
        raise base.UserError(
            f"the longest sequence is {total} tokens (sampling.max_length, or "
            "task.max_prompt_length + sampling.max_response_length); allowed: 2 to "
            f"{model.max_positions}, the model's positions"
        )
    if prompt >= total:
        raise base.UserError(
            f"sampling.max_length is {total}; allowed: above task.max_prompt_length = {prompt}, "
            "so that every prompt leaves room for an answer"
        )
    response = min(response, total - 1)
    if c.reward.overlong_buffer > response:
        raise base.UserError(
            f"reward.overlong_buffer is {c.reward.overlong_buffer}; allowed: 0 (off) to {response}, "
            "the longest response"
        )
    token_budget(c, total)
    return engine_lib.Limits(prompt, response, total)


def token_budget(c, longest: int) -> None:
    """Refuse a bin that the longest sequence does not fit into, or that no step could fill."""
    budget, most = c.optim.token_budget, c.task.prompts_per_step * c.task.group * longest
    if budget and not longest <= budget <= most:
        raise base.UserError(
            f"optim.token_budget is {budget}; allowed: 0 (off), or {longest} (the longest sequence, "
            f"prompt and response) to {most} (all sequences of a step)"
        )
    if budget and c.optim.micro_batches > 1:
        raise base.UserError(
            f"optim.micro_batches is {c.optim.micro_batches}; allowed: 1 with optim.token_budget, "
            "whose bins are run one by one already"
        )


def stop_tokens(asked: str, model: load.LoadedModel) -> tuple[int, ...]:
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


def strategies(c) -> tuple[base.DraftStrategy, ...]:
    """Read the strategies that an adaptive controller is to choose from; empty: not given."""
    given = [x.strip() for x in c.rollout.strategies.split(",") if x.strip()]
    return tuple(one_strategy(c, "rollout.strategies", text) for text in given)


def one_strategy(c, field: str, text: str) -> base.DraftStrategy:
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
