"""The fused train step: one policy forward, two losses, two updates, one executable.

The policy's features serve both losses. The head is applied at the places that predict a
response token only; the same rows of logits give log-probs, entropy and the drafter's
targets. Whatever the drafter reads of the policy has its gradient stopped, and the two
parts have separate norms and guards, so the drafter cannot touch the policy.

Ratios are on-policy: the old log-probs are this forward's own, so every ratio is exactly 1
and only its gradient acts. The rollout's log-probs appear in metrics and importance weights
alone; in the old log-probs only of rows that are stale.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fastgrpo_jax import base, sharding, spmd
from fastgrpo_jax.models import head, layers, policy
from fastgrpo_jax.models import lora as lora_lib
from fastgrpo_jax.train import distill, forward, grpo, layout, optim, parts, ratios
from fastgrpo_jax.train.layout import Places, Rows, StepBatch


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What a train step is compiled for; a new value means a new executable.

    Attributes:
      eagle: the drafter to train; None leaves the state's drafter (if any) alone.
      max_response: most response tokens of a sequence; any beyond would not be trained on.
      max_prompt: most prompt tokens; 0 allows any that leaves room for a response.
      group: sequences that follow one another and share a prompt.
      head_chunk: tokens whose logits exist at one time.
      micro_batches: parts that the rows are split into; the gradient is the same.
      remat: what of a layer the backward pass makes again, one of `policy.REMATS`.
      lora: train adapters in place of the policy's own weights.
      freeze: the policy stands still, and the drafter alone learns.

    Raises:
      base.UserError: a number is below 1.
    """

    policy: base.PolicyConfig
    eagle: base.EagleConfig | None
    loss: grpo.LossConfig
    optim: optim.OptimConfig
    drafter_optim: optim.OptimConfig
    distill: distill.DistillConfig
    max_response: int
    max_prompt: int = 0
    group: int = 1
    head_chunk: int = 256
    micro_batches: int = 1
    remat: str = "none"
    lora: lora_lib.LoraConfig | None = None
    freeze: bool = False

    def __post_init__(self):
        for field in ("max_response", "group", "head_chunk", "micro_batches"):
            if getattr(self, field) < 1:
                raise base.UserError(f"{field} is {getattr(self, field)}; allowed: 1 or more")
        if self.freeze and not self.eagle:
            raise base.UserError(
                "optim.freeze is True, but no drafter is trained either; allowed: False, or "
                "drafter.train with a drafter.kind"
            )
        if self.lora and self.loss.reference_sync_every:
            raise base.UserError(
                f"loss.reference_sync_every is {self.loss.reference_sync_every}; allowed: 0 with "
                "lora.rank above 0, whose reference is the policy without adapters"
            )


class Terms(NamedTuple):
    """Losses and what metrics are made of. Losses are sums, so those of micro-batches add up."""

    loss: Float[Array, ""]
    drafter_loss: Float[Array, ""]
    acceptance: Float[Array, ""] | None
    logps: Float[Array, "N R"]
    entropy: Float[Array, "N R"]
    policy: grpo.PolicyTerms


def init_state(
    config: StepConfig,
    params: base.Params,
    drafter_params: base.Params = None,
    adapters: base.Params = None,
) -> base.TrainState:
    """Make the first state: masters in float32 (float64 for a float64 model), moments 0; under a
    mesh each device has its part.

    The arrays given belong to the state from then on, and the first step donates them. The
    reference policy is a copy of `params`, kept only if the loss has a KL term. With LoRA,
    `adapters` are the masters, and `params` have the compute dtype.
    """
    wide, mesh = layers.at_least_float32(config.policy.dtype), config.policy.mesh
    dtype = jnp.dtype(config.policy.dtype) if config.lora else wide
    placed = sharding.put_params(mesh, (params, drafter_params, adapters))
    params, drafter_params, adapters = placed
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    adapters = jax.tree.map(lambda x: jnp.asarray(x, wide), adapters)
    trained = {} if config.freeze else adapters if config.lora else params
    drafter = jax.tree.map(lambda x: jnp.asarray(x, wide), drafter_params)
    # A buffer may be donated once: each counter and the reference need their own.
    state = base.TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optim.make_optimizer(config.optim).init(trained),
        drafter=drafter,
        drafter_opt_state=None,
        drafter_steps=jnp.zeros((), jnp.int32),
        reference=jax.tree.map(jnp.copy, params)
        if config.loss.kl_beta > 0 and not config.lora
        else None,
        adapters=adapters,
    )
    if drafter is not None:
        moments = optim.make_optimizer(config.drafter_optim).init(drafter)
        state = state._replace(drafter_opt_state=moments)
    return sharding.put_params(mesh, state)


def place(config: StepConfig, batch: StepBatch) -> StepBatch:
    """Give each device its rows of a batch, filled up with rows that contribute nothing; a packed
    batch is whole on each, since any device may run any bin."""
    mesh = config.policy.mesh
    if mesh is None:
        return batch
    if batch.packed:
        return sharding.put(mesh, batch)
    missing = -batch.tokens.shape[0] % (sharding.shards(mesh) * config.micro_batches)
    ids = sharding.put(mesh, batch.draft_ids)
    rows = layout.fill(batch._replace(draft_ids=None), missing)
    return sharding.put_rows(mesh, rows)._replace(draft_ids=ids)


def make_train_step(config: StepConfig):
    """Compile on first use (state, batch) -> (state, metrics); the state is donated.

    Metrics are float32 scalars, left on the device; those of clipping and `kl` are of the rows
    that the policy's loss keeps, the others of all. `kl` is there only with a KL term,
    `drafter/*` only with a drafter to train.

    Raises (when called):
      base.UserError: the rows do not divide into the micro-batches, or are packed and split.
    """
    step = functools.partial(_train_step, config)
    return jax.jit(step, donate_argnums=0, compiler_options=_options(config))


def _options(config: StepConfig) -> dict[str, str] | None:
    """Keep the barriers of `remat` on CPU, where XLA takes them out before it schedules: what
    should be made again late is else made early and kept, so that no memory is saved."""
    mesh = config.policy.mesh
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if config.remat == "none" or platform != "cpu":
        return None
    return {"xla_disable_hlo_passes": "cse_barrier_expander"}


def gradients(
    config: StepConfig, state: base.TrainState, batch: StepBatch
) -> tuple[base.Params, base.Params, Terms, Places]:
    """Compute both gradients over the whole batch, micro-batch by micro-batch or bin by bin.

    Returns the policy's gradients, the drafter's (None without one to train), and the terms.
    """
    places = layout.locate(batch, config.max_response, config.loss.name)
    trained = (state.trained, state.drafter if config.eagle else None)
    frozen = _Frozen(state.params if config.lora else None, state.reference)
    # Differentiating the sum is safe for the policy: no path leads from it to drafter_loss.
    grad = jax.grad(functools.partial(_losses, config), has_aux=True)
    grad = functools.partial(grad, trained, frozen)
    mesh = config.policy.mesh
    if batch.packed:
        grads, terms = parts.sum_bins(grad, batch, places, config.group, config.micro_batches, mesh)
    else:
        grads, terms = parts.sum_micro_batches(grad, batch, places, config.micro_batches, mesh)
    return *grads, terms, places


@functools.partial(jax.jit, static_argnums=0)
def merged(config: lora_lib.LoraConfig, state: base.TrainState) -> base.Params:
    """Merge a state's adapters into its policy, for rollouts."""
    return lora_lib.merge(config, state.params, state.adapters)


@functools.partial(jax.jit, static_argnums=0)
def head_gradients(
    chunk: int,
    moving: tuple[Float[Array, "V E"], Float[Array, "n E"], Float[Array, "n J E"]],
    targets: Int[Array, " n"],
    ids: Int[Array, " W"] | None,
):
    """Take the gradients of the head alone with respect to its table, the policy's features and
    the drafter's: for benches, which measure what its chunks save."""

    def total(moving):
        table, features, hidden = moving
        warm = jnp.ones(targets.shape, jnp.float32)
        scores = head.score(features, table, targets, warm, chunk, hidden, ids)
        return sum(jnp.sum(x) for x in jax.tree.leaves(scores))

    return jax.grad(total)(moving)


def _train_step(config: StepConfig, state: base.TrainState, batch: StepBatch):
    grads, drafter_grads, terms, places = gradients(config, state, batch)
    new = _policy_update(config, state, grads, terms)
    metrics = _metrics(config, state, batch, terms, places)
    metrics |= {f"grad_norm/{k}": norm for k, norm in optim.norms_by_part(grads).items()}
    done = state.step + 1
    metrics |= {
        "grad_norm": new.grad_norm,
        "policy/skipped": ~new.applied,
        "policy/skipped_total": done * (not config.freeze) - optim.updates(new.opt_state),
    }
    reference = _synchronised(config.loss, state.reference, new.params, done)
    state = state._replace(step=done, opt_state=new.opt_state, reference=reference)
    state = state._replace(**{"adapters" if config.lora else "params": new.params})
    if config.eagle:
        optimizer = optim.make_optimizer(config.drafter_optim)
        new = optim.guarded_update(
            optimizer, terms.drafter_loss, drafter_grads, state.drafter, state.drafter_opt_state
        )
        state = state._replace(
            drafter=new.params,
            drafter_opt_state=new.opt_state,
            drafter_steps=state.drafter_steps + new.applied.astype(jnp.int32),
        )
        metrics |= {
            "drafter/loss": terms.drafter_loss,
            "drafter/acceptance": terms.acceptance,
            "drafter/grad_norm": new.grad_norm,
            "drafter/skipped": ~new.applied,
            "drafter/steps": state.drafter_steps,
        }
    metrics = {name: value.astype(jnp.float32) for name, value in metrics.items()}
    mesh = config.policy.mesh
    return spmd.trained(mesh, state), spmd.whole(mesh, metrics)


def _policy_update(config: StepConfig, state: base.TrainState, grads, terms: Terms) -> optim.Update:
    if config.freeze:
        still = jnp.zeros(()), jnp.array(True)
        return optim.Update(state.trained, state.opt_state, *still)
    optimizer = optim.make_optimizer(config.optim)
    return optim.guarded_update(optimizer, terms.loss, grads, state.trained, state.opt_state)


def _synchronised(config: grpo.LossConfig, reference, params, step: Int[Array, ""]):
    """Draw the reference towards the policy every so many steps (TR-DPO, arXiv 2404.09656)."""
    if reference is None or not config.reference_sync_every:
        return reference
    alpha = config.reference_sync_alpha

    def mix():
        return jax.tree.map(lambda new, old: alpha * new + (1 - alpha) * old, params, reference)

    return jax.lax.cond(step % config.reference_sync_every == 0, mix, lambda: reference)


class _Frozen(NamedTuple):
    """What the losses read and do not change: with LoRA the policy's own weights, a reference."""

    params: base.Params
    reference: base.Params


def _losses(
    config: StepConfig, trained, frozen: _Frozen, batch: StepBatch, places: Places, rows=None
):
    """Compute both losses of some sequences, padded unless rows are given; returns their sum and
    the terms."""
    params, drafter = trained
    if config.freeze:
        params = jax.lax.stop_gradient(params)
    adapters, reference = None, frozen.reference
    if config.lora:
        adapters, params = lora_lib.scaled(config.lora, params), frozen.params
        reference = params if config.loss.kl_beta > 0 else None
    if rows is None:
        frame = forward.Frame(config.policy, config.group, config.max_prompt, config.max_response)
        rows = frame.rows(batch, places)
    taps = config.eagle.taps if config.eagle else ()
    tapped, ahead = forward.read(config.policy, params, rows, config.remat, taps, adapters)
    drafts = None
    if drafter is not None:
        unroll, mesh = config.distill.unroll, config.policy.mesh
        drafts = forward.draft(config.eagle, drafter, params["embed"], tapped, rows, unroll, mesh)
    scores = _score(config, params, ahead, batch, places, rows, drafts)
    reference_logps = None
    if reference is not None:
        ahead_reference = forward.read(config.policy, reference, rows, config.remat)[1]
        reference_logps = jax.lax.stop_gradient(
            _score(config, reference, ahead_reference, batch, places, rows).logps
        )
    old, ratio = _off_policy(config, scores.logps, batch, places)
    loss, terms = grpo.policy_loss(
        scores.logps,
        old,
        batch.advantages,
        places.weights,
        config.loss,
        reference_logps,
        ratios.truncate(ratio, config.loss.importance_cap, batch.staleness),
    )
    drafter_loss, acceptance = jnp.zeros_like(loss), None
    if drafter is not None:
        distance = distill.feature_distance(
            drafts.next_feature, ahead, forward.drafted(rows, unroll)
        )
        drafter_loss, acceptance = distill.drafter_loss(
            layout.per_sequence(distance, rows, places),
            scores.draft,
            forward.unrolled_weights(places, unroll),
            config.distill,
        )
    logps, entropy = (jnp.where(places.mask, x, 0) for x in (scores.logps, scores.entropy))
    return loss + drafter_loss, Terms(loss, drafter_loss, acceptance, logps, entropy, terms)


def _off_policy(config: StepConfig, logps, batch: StepBatch, places: Places):
    """Compute the proximal policy's log-probs, and its ratios to the behaviour policy."""
    behaviour = _behaviour(batch, places)
    old = ratios.proximal(logps, behaviour, batch.staleness)
    return old, ratios.importance(old, behaviour, places.mask, config.loss.by_sequence)


def _behaviour(batch: StepBatch, places: Places) -> Float[Array, "N R"]:
    return jnp.take_along_axis(batch.logps, places.position, axis=1)


def _score(config, params, ahead, batch, places, rows: Rows, drafts=None) -> head.Scores:
    """Score the response tokens of some rows; results are [N, R], of drafts [N, R, J]."""
    temperature = batch.temperature[jnp.maximum(rows.sequence, 0)]
    inputs = (ahead, rows.targets, temperature, drafts and drafts.hidden)
    own = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), inputs)
    # Of a bin the responses come first, and a device has one.
    filled = None if rows.spot is None else jnp.sum(rows.sequence >= 0, 1, dtype=jnp.int32)
    mesh = config.policy.mesh
    table = spmd.gathered(mesh, {"head": policy.head_table(params)})["head"]

    def score(shared, own):
        (ahead, targets, temperature, hidden), filled = own
        table, ids = shared
        count = None if filled is None else filled[0]
        return head.score(ahead, table, targets, temperature, config.head_chunk, hidden, ids, count)

    scores = spmd.by_rows(mesh, score, (table, batch.draft_ids), (own, filled))
    scores = jax.tree.map(lambda x: x.reshape(*rows.sequence.shape, *x.shape[1:]), scores)
    return jax.tree.map(lambda x: layout.per_sequence(x, rows, places), scores)


def _metrics(config: StepConfig, state, batch, terms: Terms, places: Places) -> dict[str, Any]:
    """Compute the policy's metrics from whole-batch sums."""
    mask, counted = places.mask, places.weights > 0
    ratio = _off_policy(config, terms.logps, batch, places)[1]
    behaviour, cap = _behaviour(batch, places), config.loss.importance_cap
    metrics = {
        "loss": terms.loss,
        "policy_loss": jnp.sum(places.weights * terms.policy.objective),
        "entropy": grpo.token_mean(terms.entropy, mask),
        "learning_rate": optim.learning_rate(config.optim, state.opt_state),
        **grpo.clip_metrics(terms.policy, counted),
        **ratios.sampling_metrics(terms.logps, behaviour, ratio, mask, cap),
    }
    if terms.policy.kl is not None:
        metrics["kl"] = grpo.token_mean(terms.policy.kl, counted)
    return metrics
