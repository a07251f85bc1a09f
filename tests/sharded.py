"""Laws on eight devices: all that they make is what one device makes.

`test_sharding.py` runs this file in a process that has so many.
"""

import dataclasses
import functools
import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base, configs, sharding, spmd
from fastgrpo_jax.models import attention, eagle, lora
from fastgrpo_jax.rollout import (
    buckets,
    calibrate,
    costs,
    decode,
    goodput,
    record,
    speculate,
    strategy,
)
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.train import (
    checkpoint,
    distill,
    drafter,
    grpo,
    loop,
    metrics,
    optim,
    packing,
    replay,
    spot,
    step,
)
from tests.rollout import toys

CONFIG = dataclasses.replace(toys.CONFIG, vocab=40, layers=1, heads=4, kv_heads=2, qk_norm=True)
EAGLE = eagle.config_for(CONFIG, "fastgrpo")
ONE = ()  # no mesh
TEXTS = ("off", "learned:3:3:8", "ngram:3:1:4", "learned:3:1:4")


@functools.cache
def mesh_of(sizes):
    return sharding.mesh_for(*sizes) if sizes else None


def config_of(sizes) -> base.PolicyConfig:
    return dataclasses.replace(CONFIG, mesh=mesh_of(sizes))


# Rollouts.


def cycle(*texts):
    return strategy.cycle(tuple(map(strategy.parse, texts)))


def adaptive():
    """A controller that weighs costs and tries, by a table on which all choices are alike."""
    table = costs.Table("toy", {1: 1.0, 64: 1.1}, {1: 0.1, 64: 0.1}, {1: 1.0, 64: 1.1})
    some = tuple(map(strategy.parse, TEXTS[1:]))
    settings = goodput.Settings(explore=0.5, frozen=True)
    return goodput.controller(
        lambda rows: some, lambda bucket, s: costs.seconds(table, bucket, s), settings
    )


def weights_of(sizes) -> speculate.Weights:
    mesh = mesh_of(sizes)
    params = toys.policy_params(CONFIG), toys.drafter_params(EAGLE)
    if mesh is not None:
        params = decode.cast(sharding.put_params(mesh, params), jnp.float64, mesh)
    return speculate.Weights(*params, None, sharding.put(mesh, jnp.float32(1)))


def rollout(sizes, controller, most=toys.ROWS):
    spec = speculate.Spec(config_of(sizes), EAGLE, toys.GROUP, prefill_chunk=8)
    engine = engine_lib.make_engine(
        spec,
        rows=buckets.row_ladder(most, "8", sharding.shards(spec.policy.mesh)),
        total=toys.ROWS,
        limits=toys.LIMITS,
        stop_tokens=(toys.STOP,),
        slot_step=48,
        rounds=2,
        span=toys.DEEPEST_SPAN,
    )
    engine.pool.expected = frozenset(engine_lib.programs(engine, controller))
    run = toys.rollout(engine, weights_of(sizes), controller)
    assert engine.pool.unexpected == 0
    return run, engine


@functools.cache
def alone() -> record.Rollout:
    """Decode plainly on one device."""
    return rollout(ONE, toys.fixed("off"))[0]


@pytest.mark.parametrize(
    ("sizes", "controller", "most"),
    [
        ((1, 8, 1), cycle(*TEXTS), toys.ROWS),
        ((2, 2, 2), cycle("off", "learned:3:3:8"), toys.ROWS),
        ((4, 1, 2), adaptive(), toys.ROWS),
        ((8, 1, 1), toys.fixed("learned:3:1:4"), 8),  # the ninth row waits for a seat
        ((1, 2, 4), cycle("learned:3:1:4@1.6", "off"), toys.ROWS),  # 4 devices for 2 key heads
    ],
    ids=["fsdp", "all three", "goodput", "a row waits", "shares"],
)
def test_no_factorisation_changes_a_token(sizes, controller, most):
    """D24: nine rows in buckets of 8, 10, 12 or 16, some of them empty."""
    run, engine = rollout(sizes, controller, most)
    toys.assert_same(run.batch, alone().batch)
    kinds = {str(b.strategy) for b in run.blocks}
    if controller.name == "goodput":
        assert len(kinds) > 1
    if most < toys.ROWS:
        assert any(key[0] == "admit" for key, _ in engine.pool.programs)
    elif len(kinds) > 1:
        assert {b.rows for b in run.blocks} == {8, engine.rows[-1]}
    if {"ngram:3:1:4", "learned:3:1:4"} <= kinds:
        assert toys.accepted_share(run) > 0.1
    _check_what_devices_tell(engine, run)


def _check_what_devices_tell(engine, run):
    """Memory is cut by rows and heads, and no collective of a round is as large as a cache."""
    mesh, checked = engine.spec.policy.mesh, 0
    for (key, _), program in engine.pool.programs.items():
        if key[0] != "block":
            continue
        state = program.input_shardings[0][3]
        heads = sharding.TENSOR if CONFIG.kv_heads % mesh.shape[sharding.TENSOR] == 0 else None
        assert state.cache.k[0].is_equivalent_to(sharding.on(mesh, sharding.ROWS, heads), 4)
        assert state.draft.features.is_equivalent_to(sharding.on(mesh, sharding.ROWS), 3)
        assert program.output_shardings[1].length.is_fully_replicated
        rows, slots = key[1].rows, key[1].slots
        for shape in exchanged(program.as_text()):
            assert slots not in shape[:-1], shape
            if mesh.shape[sharding.TENSOR] == 1:  # verdicts alone
                assert np.prod(shape, initial=1) <= rows * engine.spec.depth_max, shape
            checked += 1
    assert checked


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [((8, 1, 1), (4, 4)), ((2, 2, 2), (4, 4)), ((3, 2, 1), (2, 4)), ((1, 8, 1), None)],
)
def test_a_mesh_is_split_along_its_rows(sizes, parts):
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    found = sharding.split(jax.sharding.Mesh(devices, sharding.AXES))
    assert (found and tuple(x.size for x in found)) == parts
    if parts:
        assert [*found[0].devices.flat, *found[1].devices.flat] == [*devices.flat]
        assert [x.shape["tensor"] for x in found] == [sizes[2]] * 2
    assert sharding.split(None) is None


def test_the_last_rows_move_to_some_devices_and_say_the_same():
    """Nine rows on eight devices; the last four go on on four of them, the others are told."""
    mesh = mesh_of((4, 2, 1))
    spec = speculate.Spec(config_of((4, 2, 1)), EAGLE, toys.GROUP, prefill_chunk=8)
    engine = engine_lib.make_engine(
        spec,
        rows=buckets.row_ladder(toys.ROWS, "", 8),
        total=toys.ROWS,
        limits=toys.LIMITS,
        stop_tokens=(toys.STOP,),
        slot_step=24,
        rounds=2,
        span=toys.DEEPEST_SPAN,
    )
    some, idle = sharding.split(mesh)
    assert (some.size, idle.size) == (4, 4) and not {*some.devices.flat} & {*idle.devices.flat}
    engine = engine_lib.with_tail(engine, some, 1)
    assert engine.tail.rows == (4,) and engine.tail.scale == 2
    controller, spared, weighed = cycle("learned:3:1:4", "off"), [], set()

    def choose(memory, now, rounds, choose=controller.choose):
        weighed.add(now.bucket.rows)
        return choose(memory, now, rounds)

    controller = controller._replace(choose=choose)
    engine.pool.expected = frozenset(engine_lib.programs(engine, controller))
    weights = weights_of((4, 2, 1))
    run = toys.rollout(engine, weights, controller, spare=lambda: spared.append(True))
    toys.assert_same(run.batch, alone().batch)
    assert spared == [True] and engine.pool.unexpected == 0
    assert weighed == {8, 16}  # a controller knows four rows on four devices as eight on eight
    tail = [b for b in run.blocks if b.rows == 4]
    assert tail and all(b.live <= 4 for b in tail) and tail == list(run.blocks[-len(tail) :])
    assert {str(b.strategy) for b in tail} == {"learned:3:1:4", "off"}
    program = next(p for (k, _), p in engine.pool.programs.items() if k[0] == "tail block")
    assert program.input_shardings[0][3].cache.k[0].device_set == {*some.devices.flat}
    calm = dict(slots=engine.slots[-1:], rounds=toys.LIMITS.total)  # nothing else ends a block
    tail = dataclasses.replace(engine.tail, **calm)
    calm = dataclasses.replace(engine, tail=tail, **calm)
    blocks = toys.rollout(calm, weights, toys.fixed("off")).blocks
    assert blocks[0].rows == 16 and [b.rows for b in blocks[-1:]] == [4]
    engine_lib.warm_up(engine, weights, controller, 2)  # what ran is what would be compiled ahead
    blocks = [k for k, _ in engine.pool.programs if k[0].endswith("block")]
    assert len(blocks) == len(set(blocks)) > len([k for k in blocks if k[0] == "block"]) > 0


def exchanged(text: str) -> list[tuple[int, ...]]:
    """List the shapes of all results of collectives in a compiled program."""
    name = r"(?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)"
    found = re.findall(rf"= (.*?) {name}(?:-start)?\(", text)
    shapes = [s for one in found for s in re.findall(r"\w+\[([\d,]*)\]", one)]
    return [tuple(map(int, filter(None, s.split(",")))) for s in shapes]


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_costs_are_of_a_devices_own_rows(sizes, monkeypatch):
    """Each device has as many rows and tokens as the table says, whatever their number."""
    forward, draft, seen = decode.forward, decode.draft_step, []

    def spy(function, *args):
        given = next(x for x in args if isinstance(x, jax.Array))  # ids, or features
        seen.append(given.addressable_shards[0].data.shape[:2])
        return function(*args)

    monkeypatch.setattr(decode, "forward", lambda *x: spy(forward, *x))
    monkeypatch.setattr(decode, "draft_step", lambda *x: spy(draft, *x))
    policy, told = config_of(sizes), []

    def agree(mine):
        told.append(mine)
        return mine

    table = calibrate.measure(
        policy, EAGLE, weights_of(sizes), budget_s=0.0, sizes=(1, 8, 2, 4), repeats=1, agree=agree
    )
    assert set(table.forward) == {1, 8, 2} and set(table.rows) == {1, 8}  # the budget is spent
    assert {(1, 1), (1, 8), (1, 2), (8, 1), (2, 1)} == set(seen)
    assert told[-1] == table and len(told) == 2


# The train step.

N, T, R, G = 12, 14, 8, 2


def step_config(sizes, **changes) -> step.StepConfig:
    fields = dict(
        policy=config_of(sizes),
        eagle=EAGLE,
        loss=grpo.LossConfig(name="dapo", kl_beta=0.1),
        optim=optim.OptimConfig(learning_rate=1e-2),
        drafter_optim=optim.OptimConfig(learning_rate=1e-2, max_grad_norm=0.5),
        distill=distill.DistillConfig(unroll=2),
        max_response=R,
        max_prompt=6,
        group=G,
        head_chunk=5,
    )
    return step.StepConfig(**{**fields, **changes})


def batch() -> step.StepBatch:
    """Six groups of two with unequal responses, one of them empty."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab, (N, T)).astype(np.int32)
    tokens[:, :6] = tokens[::G, :6].repeat(G, axis=0)
    start = np.repeat([3, 6, 1, 5, 2, 4], G).astype(np.int32)
    length = start + np.array([8, 1, 5, 0, 3, 2, 8, 7, 4, 6, 2, 8], np.int32)
    return step.StepBatch(
        tokens=jnp.asarray(tokens),
        prompt_length=jnp.asarray(start),
        length=jnp.asarray(length),
        logps=jnp.asarray(rng.normal(-3, 0.1, (N, T)), jnp.float32),
        advantages=jnp.asarray(rng.normal(size=N), jnp.float32),
        temperature=jnp.ones(N, jnp.float32),
    )


def first_state(config) -> base.TrainState:
    params = toys.policy_params(CONFIG), toys.drafter_params(EAGLE)
    adapters = None
    if config.lora:
        adapters = lora.init(jax.random.key(2), config.lora, params[0])
        adapters = jax.tree.map(lambda x: np.asarray(x) + 0.01, adapters)
    return step.init_state(config, *jax.tree.map(np.asarray, params), adapters)


@functools.cache
def trained(sizes, budget=0, **changes):
    """Take two steps, packed if there is a budget; returns the state and what it and the metrics
    are on the host."""
    config, rows = step_config(sizes, **changes), batch()
    if budget:
        lengths = np.asarray(rows.prompt_length), np.asarray(rows.length)
        devices = sharding.shards(config.policy.mesh)
        rows = rows._replace(packed=packing.pack(*lengths, G, T, budget, devices))
        assert rows.packed.sequence.shape[0] % devices == 0
    state, train_step = first_state(config), step.make_train_step(config)
    for _ in range(2):
        state, found = train_step(state, step.place(config, rows))
    assert train_step._cache_size() == 1
    return state, jax.device_get((state, found))


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((1, 8, 1), dict(micro_batches=2, remat="full")),
        ((2, 2, 2), {}),
        ((1, 2, 4), {}),
        ((2, 2, 2), dict(budget=20)),
        ((1, 8, 1), dict(budget=14, remat="dots")),
    ],
    ids=["fsdp", "all three", "tensor", "packed", "packed, few places"],
)
def test_losses_and_updates_are_those_of_one_device(sizes, changes):
    """Twelve rows on 8, 4 or 2 devices, on 8 filled up to 16; groups together on 2 only (C19).
    Packed, each device has a bin at a time, some of the last turn an empty one."""
    state, (values, found) = trained(sizes, **changes)
    _, (wanted, wanted_metrics) = trained(ONE)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), values, wanted
    )
    assert found.keys() == wanted_metrics.keys()
    for name, value in wanted_metrics.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-6, atol=1e-7, err_msg=name)
    assert not np.array_equal(values.params["embed"], toys.policy_params(CONFIG)["embed"])
    _check_parts(state, mesh_of(sizes))


def test_adapters_are_cut_as_their_kernels_and_learn_as_on_one_device():
    """Packed or padded, on one device or eight."""
    config = lora.LoraConfig(rank=4, alpha=8.0)
    state, (values, _) = trained((2, 2, 2), lora=config)
    _, (wanted, _) = trained(ONE, lora=config)
    others = [trained(sizes, budget=20, lora=config)[1][0] for sizes in (ONE, (2, 2, 2))]
    for found in (values, *others):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), found, wanted
        )
    for name, cut in (("gate", {"a": 2, "b": 2}), ("down", {"a": 2, "b": 2})):
        for leaf, parts in cut.items():
            x = state.adapters["layer_0"]["mlp"][name][leaf]
            assert x.addressable_shards[0].data.size * parts == x.size
    merged = step.merged(config, state)
    np.testing.assert_allclose(
        merged["layer_0"]["attn"]["q"]["kernel"],
        lora.merge(config, wanted.params, wanted.adapters)["layer_0"]["attn"]["q"]["kernel"],
        rtol=1e-9,
    )


def studied(sizes) -> base.Params:
    """Learn again from five kept sequences, twice, with the rollout's weights."""
    config, mesh = step_config(sizes), mesh_of(sizes)
    rows = batch()
    kept = [
        [0, rows.tokens[i, :start].tolist(), rows.tokens[i, start:end].tolist()]
        for i, (start, end) in enumerate(zip(rows.prompt_length[:5], rows.length[:5]))
        if end > start
    ]
    weights, state = weights_of(sizes), first_state(config)
    done = replay.study(
        replay.config_for(config),
        weights.policy,
        drafter.freeze(weights.policy),
        drafter.State(state.drafter, state.drafter_opt_state),
        kept,
        2,
        np.random.default_rng(0),
    )
    assert done.updates == 2
    if mesh is not None:
        where = sharding.of_params(mesh, done.state)
        jax.tree.map(lambda x, s: np.testing.assert_equal(x.sharding, s), done.state, where)
    return jax.device_get(done.state.params)


def test_kept_sequences_teach_what_they_teach_on_one_device():
    """The lesson is whole on each device, and the drafter stays in the layout of training."""
    wanted = studied(ONE)
    for sizes in ((2, 2, 2), (1, 8, 1)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11),
            studied(sizes),
            wanted,
        )


def _check_parts(state: base.TrainState, mesh):
    """Each device holds its part of weights and moments, and no more."""
    gate = ("layer_0", "mlp", "gate", "kernel")
    cut = mesh.shape[sharding.FSDP] * mesh.shape[sharding.TENSOR]
    matrices = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        names = tuple(str(getattr(x, "key", "")) for x in path)
        part = leaf.addressable_shards[0].data
        if names[-4:] == gate or names[-2:] == ("fuse_up", "kernel"):
            assert part.size * cut == leaf.size
            matrices += 1
        elif leaf.ndim == 0:
            assert leaf.is_fully_replicated
    assert matrices >= 5  # the policy's weight, moments and reference; the drafter's, moments


def test_a_checkpoint_of_one_factorisation_is_restored_on_another(tmp_path):
    """F5: values equal, each lying where the new mesh has it; a single device does as well."""
    state, (wanted, _) = trained((2, 2, 2))
    manager = checkpoint.open_manager(tmp_path, 1)
    checkpoint.save(manager, state, {"n": 1})
    manager.wait_until_finished()
    for sizes in ((1, 4, 2), (8, 1, 1), ONE):
        like = first_state(step_config(sizes))
        found, extra = checkpoint.restore(manager, like)
        assert extra == {"n": 1}
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), wanted)
        jax.tree.map(lambda a, b: np.testing.assert_equal(a.sharding, b.sharding), found, like)
    manager.close()


# Attention's kernel.


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 4)])
def test_the_kernel_runs_on_each_devices_rows_and_heads(sizes):
    """Cut by rows and, where they divide, heads; in training and within a round's own rows."""
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.normal(size=(4, 24, 4, 64)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, 4, 2, 128, 64)), jnp.float32)
    mask = jnp.asarray(rng.random((4, 24, 128)) < 0.7)
    assert attention.pays(q.reshape(4, 2, -1, 64), k)
    mesh = mesh_of(sizes)

    def total(q, k, v, kernel, mesh):
        return jnp.sum(jnp.sin(attention.attend(q, k, v, mask, kernel, mesh)))

    wanted = jax.grad(total, (0, 1, 2))(q, k, v, "xla", None)
    run = jax.jit(jax.grad(total, (0, 1, 2)), static_argnums=(3, 4))
    found = run(q, k, v, "interpret", mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), found, wanted)

    def one(_, own):
        return attention.attend(*own, "interpret", mesh)

    out = jax.jit(lambda own: spmd.by_rows(mesh, one, (), own))((q, k, v, mask))
    plain = attention.attend(q, k, v, mask)
    np.testing.assert_allclose(out, plain, rtol=0, atol=2e-5)


# Whole runs.


def run_config(sizes, **changes):
    c = configs.load("tiny")
    c.compilation_cache = ""
    c.steps = 2
    c.checkpoint.every = 1
    c.model.dtype = "float64"
    c.task.max_prompt_length = 40
    c.sampling.max_response_length = 8
    c.rollout.row_buckets = "8"
    c.rollout.slot_step = 96
    c.rollout.controller = "goodput"
    c.rollout.strategies = "learned:2:1:3,ngram:2:1:3"
    c.rollout.measure_seconds = 0.0
    c.rollout.explore = 0.5
    c.rollout.warmup = 2
    c.reward.functions = "odd.py:odd"
    c.rollout.ngram_earlier = 2
    c.drafter.spot = False
    c.drafter.vocab = 64
    if sizes:
        c.mesh.data, c.mesh.fsdp, c.mesh.tensor = sizes
    for path, value in changes.items():
        configs.override(c, path.replace("__", "."), str(value))
    return c


def test_a_run_on_a_mesh_is_that_of_one_device_and_goes_on_with_another(
    tmp_path, capsys, monkeypatch
):
    """F5, D22: programs compiled ahead are those that run; tokens, losses and weights agree."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("odd.py").write_text(
        "def odd(completion_ids):\n    return [x[0] % 7 for x in completion_ids]\n"
    )
    loop.train(run_config((2, 2, 2), steps=1), tmp_path / "mesh")
    assert "mesh data 2 x fsdp 2 x tensor 2: 8 devices" in capsys.readouterr().err
    loop.train(run_config((1, 4, 2)), tmp_path / "mesh")
    monkeypatch.setattr(sharding, "mesh_for", lambda *_: None)
    loop.train(run_config(ONE), tmp_path / "one")
    found, wanted = (metrics.read(tmp_path / name) for name in ("mesh", "one"))
    assert len(found) == len(wanted) == 2
    said = [(tmp_path / name / "completions.jsonl").read_text() for name in ("mesh", "one")]
    assert said[0] == said[1]
    names = (
        "reward",
        "num_tokens",
        "loss",
        "grad_norm",
        "entropy",
        "drafter/loss",
        "drafter/acceptance",
    )
    for a, b in zip(found, wanted):
        for name in names:
            np.testing.assert_allclose(a[name], b[name], rtol=2e-5, atol=1e-7, err_msg=name)
        assert a["compile/unexpected"] == 0
    assert wanted[-1]["grad_norm"] > 0


def test_idle_devices_teach_the_drafter_and_change_no_token(tmp_path, capsys, monkeypatch):
    """The spot trainer: its updates are counted, its drafter is the one that goes on."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("odd.py").write_text(
        "def odd(completion_ids):\n    return [x[0] % 7 for x in completion_ids]\n"
    )
    compiling, begin, seen = spot.Trainer.compile, spot.Trainer.begin, []

    updated, update = threading.Event(), spot._Student.update

    def heard(self, rows):
        loss = update(self, rows)
        updated.set()
        return loss

    def start(self):
        updated.clear()
        begin(self)
        if self.thread:  # however short these rows are, there is time for an update
            assert updated.wait(120)

    def end(self, ended=spot.Trainer.end):
        learned, before = ended(self), self.given.state
        seen.append(learned.state is not None)
        if learned.state:
            jax.tree.map(
                lambda a, b: np.testing.assert_equal(a.sharding, b.sharding), before, learned.state
            )
            change = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), before, learned.state)
            assert max(jax.tree.leaves(change.params)) > 0
        return learned

    monkeypatch.setattr(spot.Trainer, "compile", lambda self, given: compiling(self, given).join())
    monkeypatch.setattr(spot._Student, "update", heard)
    monkeypatch.setattr(spot.Trainer, "begin", start)
    monkeypatch.setattr(spot.Trainer, "end", end)
    changes = dict(steps=3, rollout__row_buckets="", rollout__warmup=0)
    changes |= dict(sampling__stop_tokens=",".join(map(str, range(10, 70))))  # unlike lengths
    loop.train(run_config((4, 2, 1), drafter__spot=True, **changes), tmp_path / "spot")
    loop.train(run_config((4, 2, 1), **changes), tmp_path / "none")
    said = [(tmp_path / name / "completions.jsonl").read_text() for name in ("spot", "none")]
    assert said[0] == said[1]
    found, plain = (metrics.read(tmp_path / name) for name in ("spot", "none"))
    assert [row["grad_norm"] for row in found] == [row["grad_norm"] for row in plain]
    assert "spot/updates" not in plain[0] and found[0]["spot/updates"] == 0  # nothing to read yet
    updates = [row["spot/updates"] for row in found]
    assert updates[1] > 0 and updates[2] > 0
    done = [row["drafter/steps"] for row in found]
    assert done == [1, 2 + updates[1], 3 + sum(updates)]
    for row in found[1:]:
        assert 0 < row["spot/busy_s"] and 0 < row["spot/idle_s"]
        assert np.isfinite([row["spot/loss"], row["spot/acceptance_gained"]]).all()
        assert row["spot/acceptance_gained"] != 0
        assert row["compile/unexpected"] == 0
    assert seen == [False, True, True]
    losses = [[row["drafter/loss"] for row in rows] for rows in (found, plain)]
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1] and losses[0][2] != losses[1][2]  # it goes on from there
