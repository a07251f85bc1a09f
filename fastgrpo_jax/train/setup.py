"""From a config to the typed parts of a run. The config object ends here and in the loop.

Everything that can be refused is refused here, before any work: numbers first, then data and
rewards, then the model.
"""

import dataclasses
import hashlib
import pathlib
from typing import NamedTuple

import jax

from fastgrpo_jax import base, sharding
from fastgrpo_jax.models import eagle, eagle_file, load, lora
from fastgrpo_jax.rollout import buckets, inputs
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.train import check, data, distill, grpo, optim, rewards, tasks
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
    limits: engine_lib.Limits
    sampling: inputs.Settings
    step: step_lib.StepConfig


class Losses(NamedTuple):
    """What the train step needs of the config alone."""

    loss: grpo.LossConfig
    optim: optim.OptimConfig
    drafter_optim: optim.OptimConfig
    distill: distill.DistillConfig
    lora: lora.LoraConfig | None


def prepare(c) -> Setup:
    """Check a config and make all parts of its run; reads the data and the model.

    Raises:
      UserError: naming the field, its value and what is allowed.
    """
    check.numbers(c)
    mesh = sharding.mesh_for(c.mesh.data, c.mesh.fsdp, c.mesh.tensor)
    losses = _losses(c)
    check.one_strategy(c, "rollout.strategy", c.rollout.strategy)
    check.strategies(c)
    task = data.open_task(
        c.task.name,
        seed=c.seed,
        shuffle=c.task.shuffle,
        max_operand=c.task.max_operand,
        max_terms=c.task.max_terms,
    )
    functions = rewards.load_rewards(c.reward.functions, c.reward.weights)
    model = load.load(c.model.name, c.model.dtype, c.seed, c.model.attention)
    model = model._replace(config=dataclasses.replace(model.config, mesh=mesh))
    head, drafter, counts = _drafter(c, model.config)
    sharding.check(mesh, model.config, head)
    rendering = data.Rendering(
        model.tokenizer,
        c.task.system,
        c.task.chat,
        c.task.max_prompt_length,
        c.task.overlong_prompt,
    )
    check.stop_tokens(c.sampling.stop_tokens, model)
    buckets.row_ladder(c.task.prompts_per_step * c.task.group, c.rollout.row_buckets)
    _check_rows(c, task, rendering, functions)
    limits = check.limits(c, model.config)
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
        sampling=inputs.Settings(c.sampling.temperature, c.sampling.top_k, c.sampling.top_p),
        step=step_lib.StepConfig(
            policy=model.config,
            eagle=head if c.drafter.train else None,
            max_response=limits.response,
            max_prompt=limits.prompt,
            group=c.task.group,
            head_chunk=c.loss.head_chunk,
            micro_batches=c.optim.micro_batches,
            remat=check.REMATS[c.optim.remat.lower()],
            freeze=c.optim.freeze,
            **losses._asdict(),
        ),
    )


_CHECKED_ROWS = 20_000  # of a finite source, at start


def _check_rows(c, task: data.Task, rendering: data.Rendering, functions) -> None:
    """Render the rows that the run will come to, so that a bad one is answered at start."""
    first = data.take(task, 0, 1, rendering)[0][0]
    rewards.check_columns(functions, first.columns)
    taken = c.steps * c.task.prompts_per_step * (1 + c.task.resample_max)
    numeric = any(reward.fn is rewards.exact_number for reward in functions)
    for place in range(min(task.size or 1, taken, _CHECKED_ROWS)):
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
    kind, depths, path = c.drafter.kind, c.drafter.features, c.drafter.init
    if path and kind == "none":
        raise base.UserError(f"drafter.init is {path!r}, but drafter.kind is 'none'")
    if not path:
        return (None if kind == "none" else eagle.config_for(policy, kind, depths)), None, {}
    head, params, counts = eagle_file.load(path, policy)
    if head.kind != kind:
        raise base.UserError(
            f"drafter.kind is {kind!r}; allowed: {head.kind!r}, as drafter.init {path!r} holds"
        )
    if max(len(head.taps), 1) != depths:
        raise base.UserError(
            f"drafter.features is {depths}; allowed: {max(len(head.taps), 1)}, as drafter.init "
            f"{path!r} holds"
        )
    return head, params, counts


def first_state(c, setup: Setup) -> base.TrainState:
    """Make the state before the first step: the loaded policy; the drafter loaded or drawn."""
    drafter = setup.drafter
    if setup.eagle is not None and drafter is None:
        drafter = eagle.init(jax.random.key(c.seed + 1), setup.eagle)
    params, adapters = setup.model.params, None
    if setup.step.lora:
        adapters = lora.init(jax.random.key(c.seed + 2), setup.step.lora, params)
    return step_lib.init_state(setup.step, params, drafter, adapters)


def _lora(c) -> lora.LoraConfig | None:
    if not c.lora.rank:
        return None
    targets = tuple(name.strip() for name in c.lora.targets.split(","))
    return lora.LoraConfig(c.lora.rank, c.lora.alpha, targets)


def _losses(c) -> Losses:
    loss, o, d = c.loss, c.optim, c.drafter
    return Losses(
        loss=grpo.LossConfig(
            name=loss.name,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            kl_beta=loss.kl_beta,
            kl_estimator=loss.kl_estimator,
            reference_sync_every=loss.reference_sync_every,
            reference_sync_alpha=loss.reference_sync_alpha,
            importance_cap=loss.importance_cap,
            advantage_scale=loss.advantage_scale,
        ),
        optim=optim.OptimConfig(
            optimizer=o.optimizer,
            learning_rate=o.learning_rate,
            schedule=o.schedule,
            warmup_steps=o.warmup_steps,
            decay_steps=o.decay_steps,
            weight_decay=o.weight_decay,
            b1=o.b1,
            b2=o.b2,
            eps=o.eps,
            max_grad_norm=o.max_grad_norm,
            mu_dtype=o.mu_dtype,
        ),
        drafter_optim=optim.OptimConfig(
            optimizer=d.optimizer,
            learning_rate=d.learning_rate,
            b1=o.b1,
            b2=o.b2,
            max_grad_norm=d.max_grad_norm,
            section="drafter",
        ),
        distill=distill.DistillConfig(
            d.feature_weight, d.token_weight, d.token_loss, d.unroll, d.decay
        ),
        lora=_lora(c),
    )
