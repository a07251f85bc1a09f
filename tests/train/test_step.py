import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.train import distill, grpo, optim, packing, step

V, N, T, R = 53, 4, 10, 6
POLICY = base.PolicyConfig(
    vocab=V, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=24, max_positions=64
)
CONFIG = step.StepConfig(
    policy=POLICY,
    eagle=eagle.config_for(POLICY, "fastgrpo"),
    loss=grpo.LossConfig(),
    optim=optim.OptimConfig(learning_rate=1e-2),
    drafter_optim=optim.OptimConfig(learning_rate=1e-2, max_grad_norm=0.5),
    distill=distill.DistillConfig(),
    max_response=R,
    head_chunk=5,  # 24 places: the last chunk is short
)


def in_float64(config, **changes):
    wide = dataclasses.replace(config.policy, dtype="float64")
    drafter = dataclasses.replace(config.eagle, dtype="float64")
    return dataclasses.replace(config, policy=wide, eagle=drafter, **changes)


@functools.cache
def raw_params():
    params = policy.init(jax.random.key(0), POLICY)
    drafter = eagle.init(jax.random.key(1), CONFIG.eagle)
    # Ten times the usual deviation: distributions and features are then far from uniform.
    return jax.tree.map(lambda x: np.asarray(x * 10 if x.ndim > 1 else x), (params, drafter))


def new_state(config):
    return step.init_state(config, *raw_params())


def batch(**changes):
    """Unequal lengths; row 1 has a one-token prompt, row 3 no response, its places reaching beyond T."""
    rng = np.random.default_rng(0)
    values = dict(
        tokens=jnp.asarray(rng.integers(0, V, (N, T)), jnp.int32),
        prompt_length=jnp.array([3, 1, 4, 9], jnp.int32),
        length=jnp.array([9, 4, 10, 9], jnp.int32),
        logps=jnp.asarray(rng.normal(-3, 0.1, (N, T)), jnp.float32),
        advantages=jnp.array([1.0, -0.5, 0.25, 3.0], jnp.float32),
        temperature=jnp.array([1.0, 0.6, 0.0, 1.0], jnp.float32),
    )
    return step.StepBatch(**{**values, **changes})


train_step = step.make_train_step(CONFIG)
gradients = jax.jit(step.gradients, static_argnums=0)
equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)


def host(tree):
    return jax.tree.map(np.array, tree)


@pytest.fixture(scope="module")
def one_step():
    state, metrics = train_step(new_state(CONFIG), batch())
    return host(state), host(metrics)


def with_reference(name, beta, **loss):
    config = in_float64(CONFIG, loss=grpo.LossConfig(name=name, kl_beta=beta, **loss))
    state = new_state(config)
    if beta:
        state = state._replace(reference=jax.tree.map(lambda x: x * 0.9, state.params))
    return config, state


@functools.partial(jax.jit, static_argnums=0)
def body(config, params, tokens):
    """Run the policy over whole rows; returns features, positions and mask."""
    rows, count = tokens.shape
    place = jnp.broadcast_to(jnp.arange(count), (rows, count))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((count, count), bool)), (rows, count, count))
    out = policy.Policy(config.policy).apply({"params": params}, tokens, place, mask)
    return out.features, place, mask


def longhand_weights(b, name, first=0):
    """Spell out the weight of every token, [N, T]; those before place `first` have none."""
    spans = [range(max(int(p), first), int(n)) for p, n in zip(b.prompt_length, b.length)]
    if b.kept is not None and not first:
        spans = [span if kept else range(0) for span, kept in zip(spans, b.kept)]
    weights = np.zeros((N, T))
    for row, span in enumerate(spans):
        for i in span:
            if name == "grpo":
                weights[row, i] = 1 / len(span) / sum(len(s) > 0 for s in spans)
            elif name == "dr_grpo":
                weights[row, i] = 1 / R / sum(len(s) > 0 for s in spans)
            else:
                weights[row, i] = 1 / sum(len(s) for s in spans)
    return weights


def longhand(config, params, drafter, reference, b, weights, drafter_weights):
    """Compute (loss, drafter loss) with textbook formulas over the logits of all places."""
    f, place, mask = body(config, params, b.tokens)
    heat = jnp.where(b.temperature == 0, 1, b.temperature)[:, None, None]
    f0, table = jax.lax.stop_gradient((f, params["embed"]))

    def logps(features, head):
        """Entry i is the log-prob of token i, made at place i - 1."""
        scores = jax.nn.log_softmax(features[:, :-1] @ head.T / heat)
        return jnp.take_along_axis(scores, b.tokens[:, 1:, None], axis=2)[..., 0]

    logp = logps(f, params["embed"])
    old = now = jax.lax.stop_gradient(logp)
    importance = 1
    if b.staleness is not None:
        stale = b.staleness[:, None]
        old = jnp.where(stale > 0, now + (b.logps[:, 1:] - now) / jnp.maximum(stale, 1), now)
        importance = jnp.minimum(jnp.exp(old - b.logps[:, 1:]), config.loss.importance_cap)
    loss = -importance * jnp.exp(logp - old) * b.advantages[:, None].astype(jnp.float64)
    if config.loss.kl_beta:
        ahead = logps(body(config, reference, b.tokens)[0], reference["embed"]) - logp
        loss += config.loss.kl_beta * (jnp.exp(ahead) - ahead - 1)
    following, hidden, _ = eagle.Eagle(config.eagle).apply(
        {"params": drafter}, f0[:, :-1], table[b.tokens[:, 1:]], place[:, :-1], mask[:, :-1, :-1]
    )
    d = jnp.abs(following - f0[:, 1:])  # pair t estimates the feature of t + 1
    target = jax.nn.softmax(f0[:, 1:] @ table.T)
    ce = -jnp.sum(target * jax.nn.log_softmax(hidden @ table.T), axis=2)
    drafter_loss = 2 * jnp.mean(jnp.where(d < 1, d**2 / 2, d - 0.5), axis=2) + 0.1 * ce
    # Entry 0 of `loss` is token 1; entry 0 of `drafter_loss`, of pair 0, is token 2.
    return (
        jnp.sum(weights[:, 1:] * loss),
        jnp.sum(drafter_weights[:, 2:] * drafter_loss[:, :-1]),
    )


STALE = dict(
    kept=jnp.array([True, False, True, True]), staleness=jnp.array([0, 2, 3, 1], jnp.int32)
)


@pytest.mark.parametrize(
    "name, beta, fields", [("grpo", 0.0, {}), ("dapo", 0.5, {}), ("dr_grpo", 0.0, STALE)]
)
def test_losses_and_gradients_are_the_longhand_ones_for_any_micro_batches_and_packed(
    name, beta, fields
):
    """C1, C3, E1, E10: 1, 2 and 4 micro-batches, and bins, against one unchunked pass, in float64.

    The policy's gradient is that of its own loss alone, the drafter's that of its own. Rows that
    the policy's loss leaves out still teach the drafter; stale ones are weighed, here unclipped.
    """
    loose = dict(clip_low=1.0, clip_high=1e9, importance_cap=1.05) if fields else {}
    config, state = with_reference(name, beta, **loose)
    b = batch(**fields)
    if fields:  # near the trainer's own, so that some weights are capped and some are not
        b = b._replace(logps=jnp.asarray(numpy_logps(b)[0], jnp.float32) - batch().logps - 3)
    weights = longhand_weights(b, name), longhand_weights(b, "grpo", first=2)

    @jax.jit
    def reference(params, drafter):
        def total(params, drafter):
            losses = longhand(config, params, drafter, state.reference, b, *weights)
            return sum(losses), losses

        return jax.grad(total, (0, 1), has_aux=True)(params, drafter)

    (expected, expected_drafter), losses = reference(state.params, state.drafter)
    packed = packing.pack(np.asarray(b.prompt_length), np.asarray(b.length), 1, T, 15)
    for parts in (1, 2, 4, "packed"):
        split = dataclasses.replace(config, micro_batches=1 if parts == "packed" else parts)
        whole = b._replace(packed=packed) if parts == "packed" else b
        grads, drafter_grads, terms, _ = gradients(split, state, whole)
        # Weights of tokens are float32, so 1 / 6 holds to 3e-8 only.
        np.testing.assert_allclose([terms.loss, terms.drafter_loss], losses, rtol=2e-7)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
        jax.tree.map(close, grads, expected)
        jax.tree.map(close, drafter_grads, expected_drafter)


def numpy_logps(b):
    """Return log softmax(logits / T) and its entropy at every token of every row."""
    logps, entropy = np.zeros((N, T)), np.zeros((N, T))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), raw_params()[0])
    f, _, _ = body(CONFIG, params, b.tokens)
    for n in range(N):
        heat = float(b.temperature[n]) or 1.0
        for i in range(1, T):
            logits = np.asarray(f[n, i - 1], np.float64) @ np.asarray(params["embed"]).T / heat
            p = np.exp(logits - logits.max())
            p /= p.sum()
            logps[n, i] = np.log(p[b.tokens[n, i]])
            entropy[n, i] = -(p * np.log(p)).sum()
    return logps, entropy


def test_metrics_are_those_of_the_batch_and_ratios_are_one_at_any_temperature():
    """C7, C8, B21, C15: recorded log-probs at T 0.6, 0 (scored at 1) and 1 are the trainer's own."""
    b = batch()
    logps, entropy = numpy_logps(b)
    _, metrics = train_step(new_state(CONFIG), b._replace(logps=jnp.asarray(logps, jnp.float32)))
    grads, drafter_grads, terms, _ = gradients(*with_reference("grpo", 0.0), b)
    mask = (np.arange(T) >= b.prompt_length[:, None]) & (np.arange(T) < b.length[:, None])
    expected = {
        "loss": -np.mean(b.advantages[:3]),
        "policy_loss": -np.mean(b.advantages[:3]),
        "entropy": entropy[mask].mean(),
        "grad_norm": optax_norm(grads),
        "grad_norm/embed": optax_norm(grads["embed"]),
        "grad_norm/attention": optax_norm(grads["layer_0"]["attn"]),
        "grad_norm/mlp": optax_norm(grads["layer_0"]["mlp"]),
        "grad_norm/norms": optax_norm(
            [grads["norm"], grads["layer_0"]["attn_norm"], grads["layer_0"]["mlp_norm"]]
        ),
        "learning_rate": 1e-2,
        "policy/skipped": 0,
        "policy/skipped_total": 0,
        "drafter/loss": terms.drafter_loss,
        "drafter/acceptance": terms.acceptance,
        "drafter/grad_norm": optax_norm(drafter_grads),
        "drafter/steps": 1,
        "drafter/skipped": 0,
        "sampling/sampling_logp_difference/mean": 0,
        "sampling/sampling_logp_difference/max": 0,
        "sampling/importance_sampling_ratio/min": 1,
        "sampling/importance_sampling_ratio/mean": 1,
        "sampling/importance_sampling_ratio/max": 1,
        **{f"clip_ratio/{k}": 0 for k in ("region_mean", "low_mean", "low_min", "high_mean")},
        "clip_ratio/high_max": 0,
    }
    assert set(metrics) == set(expected)
    for name, value in metrics.items():
        assert value.dtype == jnp.float32 and value.shape == (), name
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert metrics["grad_norm"] > 0.01


def optax_norm(tree):
    return np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("scale", [-3.0, 1e20, np.nan])
def test_the_drafters_weights_do_not_reach_the_policy_bitwise(one_step, scale):
    """Law 4, E10: another drafter, one whose loss overflows, one of NaNs."""
    state = new_state(CONFIG)
    drafter = host(jax.tree.map(lambda x: x * scale, state.drafter))
    after, metrics = train_step(state._replace(drafter=jax.tree.map(jnp.array, drafter)), batch())
    expected, expected_metrics = one_step
    equal(after.params, expected.params)
    equal(after.opt_state, expected.opt_state)
    for name in metrics:
        if not name.startswith("drafter/"):
            np.testing.assert_array_equal(metrics[name], expected_metrics[name])
    if np.isnan(scale):
        assert (metrics["drafter/skipped"], metrics["drafter/steps"]) == (1, 0)
        assert (int(after.step), int(after.drafter_steps)) == (1, 0)
        equal(after.drafter, drafter)
        equal(after.drafter_opt_state, new_state(CONFIG).drafter_opt_state)


def test_a_policy_with_a_nan_loss_is_skipped_while_the_drafter_moves(one_step):
    """C17"""
    before = host(new_state(CONFIG))
    bad = batch(advantages=jnp.array([1.0, jnp.nan, 0.25, 3.0], jnp.float32))
    after, metrics = train_step(new_state(CONFIG), bad)
    assert (metrics["policy/skipped"], metrics["drafter/skipped"]) == (1, 0)
    equal(after.params, before.params)
    equal(after.opt_state, before.opt_state)
    equal(after.drafter, one_step[0].drafter)
    assert after.drafter_steps == 1
    totals = []
    for each in (batch(), bad, batch()):
        after, metrics = train_step(after, each)
        totals.append(metrics["policy/skipped_total"])
    assert totals == [1, 2, 2]


def test_without_an_advantage_the_policy_stays_and_the_drafter_learns(one_step):
    """B5"""
    before = host(new_state(CONFIG))
    after, metrics = train_step(new_state(CONFIG), batch(advantages=jnp.zeros(N, jnp.float32)))
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["policy/skipped"] == 0
    equal(after.params, before.params)
    equal(after.drafter, one_step[0].drafter)


def test_what_follows_a_row_and_rows_without_response_are_never_read(one_step):
    """A3, A4: by place, not by value: the ids put there occur in the rows too."""
    b = batch()
    rng = np.random.default_rng(9)
    outside = (np.arange(T) >= b.length[:, None]) | (np.arange(N) == 3)[:, None]
    noise = jnp.asarray(rng.integers(0, V, (N, T)), jnp.int32)
    dirty = b._replace(
        tokens=jnp.where(outside, noise, b.tokens),
        logps=jnp.where(outside, jnp.nan, b.logps),
        advantages=b.advantages.at[3].set(-7.0),
        temperature=b.temperature.at[3].set(0.3),
    )
    state, metrics = train_step(new_state(CONFIG), dirty)
    equal(state, one_step[0])
    equal(metrics, one_step[1])


def test_a_batch_without_response_tokens_changes_nothing():
    """C4"""
    b = batch()
    before = host(new_state(CONFIG))
    after, metrics = train_step(new_state(CONFIG), b._replace(length=b.prompt_length))
    assert all(np.isfinite(v) for v in metrics.values())
    equal((after.params, after.drafter), (before.params, before.drafter))


def test_repeated_steps_use_one_executable_and_do_what_they_are_for():
    """C13, F10, F12: the probability of a rewarded response rises, the drafter's loss falls."""
    b = batch()
    alone = b._replace(length=b.prompt_length.at[0].set(b.length[0]))
    state = new_state(CONFIG)
    first = state
    ratios, losses = [], []
    for _ in range(4):
        state, metrics = train_step(state, alone)
        ratios.append(metrics["sampling/importance_sampling_ratio/mean"])
        losses.append(metrics["drafter/loss"])
    assert all(a < b for a, b in itertools.pairwise(ratios))
    assert all(a > b for a, b in itertools.pairwise(losses))
    assert state.step == 4 and state.drafter_steps == 4
    assert train_step._cache_size() == 1
    assert first.params["embed"].is_deleted()  # donated


@pytest.mark.parametrize("ids", [None, (3, 5, 7, 11, 13, 17, 19)])
@pytest.mark.parametrize("budget", [0, 30])
def test_no_array_of_the_step_holds_the_logits_of_all_places(ids, budget):
    """C18: what has a vocabulary axis is a chunk of logits or the embedding, times 1 at most.

    So it is with the draft vocabulary's axis, in padded and in packed steps, of two unrolled steps.
    """
    config = dataclasses.replace(CONFIG, distill=distill.DistillConfig(unroll=2))
    b = batch(draft_ids=None if ids is None else jnp.array(ids, jnp.int32))
    if budget:
        lengths = np.asarray(b.prompt_length), np.asarray(b.length)
        b = b._replace(packed=packing.pack(*lengths, 1, T, budget))
    lowered = step.make_train_step(config).lower(new_state(config), b)
    text = lowered.compile().as_text()
    shapes = {tuple(map(int, s.split(","))) for s in re.findall(r"[a-z]\w*\[([\d,]+)\]", text)}
    sizes = {math.prod(s) for s in shapes if V in s}
    assert CONFIG.head_chunk * V in sizes
    assert max(sizes) == POLICY.hidden * V < N * R * V
    if ids is not None:
        few = {math.prod(s) for s in shapes if len(ids) in s}
        assert max(few) == POLICY.hidden * len(ids) < N * R * 2 * len(ids)


def test_other_ids_in_the_draft_vocabulary_are_the_same_program_and_leave_the_policy_alone():
    train, found = step.make_train_step(CONFIG), []
    for ids in ((1, 2, 3), (4, 5, 6)):
        after, metrics = train(new_state(CONFIG), batch(draft_ids=jnp.array(ids, jnp.int32)))
        found.append((host(after), float(metrics["drafter/loss"])))
    (one, loss), (other, other_loss) = found
    equal((one.params, one.opt_state), (other.params, other.opt_state))
    assert loss != other_loss
    assert train._cache_size() == 1


def test_the_gradient_of_a_tied_embedding_adds_both_uses():
    """F18: against finite differences, and against untied copies (with remat, another drafter)."""
    config, state = with_reference("dapo", 0.5)
    b = batch(advantages=jnp.zeros(N, jnp.float32))  # leaves the KL, whose value can be varied
    grads, _, _, _ = gradients(config, state, b)
    direction = np.random.default_rng(0).normal(size=(V, POLICY.hidden))

    def loss(step_size):
        moved = {**state.params, "embed": state.params["embed"] + step_size * direction}
        return gradients(config, state._replace(params=moved), b)[2].loss

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    np.testing.assert_allclose(jnp.sum(grads["embed"] * direction), slope, rtol=1e-6)

    untied = dataclasses.replace(
        config,
        policy=dataclasses.replace(config.policy, tied=False),
        eagle=dataclasses.replace(config.eagle, kind="eagle"),
        remat="full",
    )
    params = {**state.params, "head": state.params["embed"]}
    reference = {**state.reference, "head": state.reference["embed"]}
    drafter = eagle.init(jax.random.key(1), untied.eagle)
    both, drafter_grads, _, _ = gradients(
        untied, state._replace(params=params, reference=reference, drafter=drafter), b
    )
    tied = {**both, "embed": both["embed"] + both["head"]}
    del tied["head"]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-12), tied, grads)
    assert all(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(drafter_grads))


def test_layers_that_are_made_again_take_less_memory_and_give_the_same_gradient():
    """Attention's scores are the most of it; `dots` keeps less than none and more than `full`."""
    deep = dataclasses.replace(in_float64(CONFIG).policy, layers=6, heads=8)
    config = dataclasses.replace(in_float64(CONFIG), policy=deep, eagle=None, max_response=90)
    rng = np.random.default_rng(0)
    b = batch(
        tokens=jnp.asarray(rng.integers(0, V, (N, 96)), jnp.int32),
        logps=jnp.zeros((N, 96), jnp.float32),
        length=jnp.array([90, 60, 96, 80], jnp.int32),
    )
    params = policy.init(jax.random.key(0), deep)
    found = {}
    for remat in policy.REMATS:
        again = dataclasses.replace(config, remat=remat)
        state = step.init_state(again, jax.tree.map(jnp.array, params))
        compiled = step.make_train_step(again).lower(state, b).compile()
        bytes = compiled.memory_analysis().temp_size_in_bytes
        found[remat] = bytes, compiled(state, b)[1]["grad_norm"]
    (none, norm), (full, full_norm), (dots, dots_norm) = found.values()
    assert full < dots < none and full < none / 3
    np.testing.assert_allclose([full_norm, dots_norm], norm, rtol=1e-6)


@pytest.mark.parametrize("budget", [0, 15])
def test_a_bfloat16_model_keeps_and_moves_float32_masters(budget):
    """F9, C14: at rate 1e-6; the KL to the reference is 0 at first, and the reference stays."""
    b = batch()
    if budget:
        lengths = np.asarray(b.prompt_length), np.asarray(b.length)
        b = b._replace(packed=packing.pack(*lengths, 1, T, budget))
    config = dataclasses.replace(
        CONFIG,
        policy=dataclasses.replace(POLICY, dtype="bfloat16"),
        eagle=dataclasses.replace(CONFIG.eagle, dtype="bfloat16"),
        loss=grpo.LossConfig(kl_beta=0.04),
        optim=optim.OptimConfig(learning_rate=1e-6),
    )
    state = new_state(config)
    before = host(state)
    after, metrics = step.make_train_step(config)(state, b)
    for x in jax.tree.leaves((after.params, after.opt_state, after.drafter)):
        assert x.dtype in (jnp.float32, jnp.int32)
    moved = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), after.params, before.params)
    assert all(5e-7 < m < 2e-6 for m in jax.tree.leaves(moved))
    assert 0 <= metrics["kl"] < 1e-6
    assert all(np.isfinite(v) for v in metrics.values())
    equal(after.reference, before.params)


def test_the_reference_moves_towards_the_policy_every_so_many_steps_in_one_executable():
    """Every second step by a quarter; the KL is to the reference as it was before the step."""
    loss = grpo.LossConfig(kl_beta=0.1, reference_sync_every=2, reference_sync_alpha=0.25)
    config = dataclasses.replace(CONFIG, eagle=None, loss=loss)
    train = step.make_train_step(config)
    state = new_state(config)
    reference = start = host(state.params)
    for number in (1, 2, 3, 4):
        state, metrics = train(state, batch())
        policy_now = host(state.params)
        if number % 2 == 0:
            mixed = jax.tree.map(lambda p, r: 0.25 * p + 0.75 * r, policy_now, reference)
            close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
            jax.tree.map(close, host(state.reference), mixed)
        else:
            equal(state.reference, reference)
        assert (metrics["kl"] > 0) == (number > 1)
        reference = host(state.reference)
    assert np.abs(reference["embed"] - start["embed"]).max() > 1e-3
    assert train._cache_size() == 1


def test_without_drafter_training_the_policy_agrees_within_rounding(one_step):
    """Law 4, D20: the drafter is left as it is, and there are no metrics of it."""
    config = dataclasses.replace(CONFIG, eagle=None)
    state = new_state(config)
    drafter = host(state.drafter)
    after, metrics = step.make_train_step(config)(state, batch())
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(close, host(after.opt_state), one_step[0].opt_state)
    np.testing.assert_allclose(metrics["grad_norm"], one_step[1]["grad_norm"], rtol=1e-5)
    equal(after.drafter, drafter)
    assert not any(name.startswith("drafter/") for name in metrics)


def test_rows_that_do_not_divide_are_refused_with_both_numbers():
    config = dataclasses.replace(CONFIG, micro_batches=3)
    state = new_state(config)
    with pytest.raises(base.UserError, match="micro_batches is 3, but a step has 4 rows"):
        step.make_train_step(config)(state, batch())
    assert not state.params["embed"].is_deleted()


@pytest.mark.parametrize("field", ["max_response", "head_chunk", "micro_batches"])
def test_a_size_below_one_is_refused(field):
    with pytest.raises(base.UserError, match=f"{field} is 0; allowed: 1 or more"):
        dataclasses.replace(CONFIG, **{field: 0})
