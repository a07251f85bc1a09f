"""The engine's schedule and borders: stops, limits, ladders, programs, reports, bad input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle, tiny
from fastgrpo_jax.rollout import buckets, decode, inputs, record, speculate, strategy
from fastgrpo_jax.rollout import engine as engine_lib
from fastgrpo_jax.rollout import pool as pool_lib
from tests.rollout import toys

CHAIN, TREE = "oracle:3:1:4", "oracle:3:3:10"
DEPTH = 3
LADDER = (2, 4, toys.ROWS)


def cut(batch: base.RolloutBatch, stop: int, limits: engine_lib.Limits) -> base.RolloutBatch:
    """Cut an unstopped rollout at each row's first stop token or limit, row by row."""
    rows = []
    for i, start in enumerate(batch.prompt_length):
        end = min(start + limits.response, limits.total, batch.length[i])
        at = [j for j in range(start, end) if batch.tokens[i, j] == stop]
        length = at[0] + 1 if at else end
        known = np.arange(batch.tokens.shape[1]) < length
        rows.append((batch.tokens[i] * known, batch.logps[i] * known, length, bool(at)))
    tokens, logps, length, stopped = map(np.array, zip(*rows))
    return batch._replace(tokens=tokens, logps=logps, length=length, stopped=stopped)


def unstopped() -> record.Rollout:
    return toys.plain(stop=toys.NEVER)


def answer(text, weights, *, stop=toys.NEVER, limits=toys.LIMITS, request=toys.REQUEST, rounds=4):
    engine = toys.engine(stop=stop, rounds=rounds)
    return toys.rollout(engine, weights, toys.fixed(text), request=request, limits=limits)


@pytest.mark.parametrize("text", ("off", CHAIN, TREE, "learned:3:3:8"))
def test_a_stop_token_ends_a_row_at_every_offset_of_a_block(text):
    """Each token that the model really said is declared the stop token in turn (D1, A6)."""
    whole = unstopped()
    weights = toys.told(whole)
    offsets = set()
    for stop in sorted(set(whole.batch.tokens.ravel().tolist())):
        wanted = cut(whole.batch, stop, toys.LIMITS)
        toys.assert_same(answer(text, weights, stop=stop).batch, wanted)
        ended = wanted.length[wanted.stopped] - wanted.prompt_length[wanted.stopped]
        offsets |= {(n - 1) % (DEPTH + 1) for n in ended.tolist()}
    assert offsets == set(range(DEPTH + 1))


@pytest.mark.parametrize("text", ("off", CHAIN, TREE, "learned:3:3:8"))
def test_response_limits_are_exact(text):
    """Limits of 1, 2, ..., k, k + 1, ... tokens: not one too many or few (D4, D6)."""
    whole = unstopped()
    for limit in (*range(1, 2 * DEPTH + 4), 21):
        limits = toys.LIMITS._replace(response=limit)
        run = answer(text, toys.told(whole), limits=limits)
        toys.assert_same(run.batch, cut(whole.batch, toys.NEVER, limits))
        said = run.batch.length - run.batch.prompt_length
        assert said.max() == limit and not run.batch.stopped.any()
        assert np.all((run.batch.logps != 0).sum(axis=1) == said)


@pytest.mark.parametrize("text", ("off", CHAIN, TREE))
def test_the_total_limit_is_exact(text):
    """The longest prompt, of exactly the prompt limit, gets 1 to k + 2 tokens (D4, A12)."""
    whole = unstopped()
    for total in range(13, 13 + DEPTH + 2):
        limits = toys.LIMITS._replace(total=total)
        run = answer(text, toys.told(whole), limits=limits)
        toys.assert_same(run.batch, cut(whole.batch, toys.NEVER, limits))
        assert run.batch.length.max() == total and not run.batch.stopped.any()


def test_a_stop_token_at_the_limit_counts_as_stopped():
    whole = unstopped().batch
    limits = toys.LIMITS._replace(response=5)
    stop = int(whole.tokens[1, whole.prompt_length[1] + 4])
    for text in ("off", CHAIN, TREE):
        run = answer(text, toys.told(unstopped()), stop=stop, limits=limits)
        toys.assert_same(run.batch, cut(whole, stop, limits))
        assert run.batch.stopped[1] and run.batch.length[1] == whole.prompt_length[1] + 5


@pytest.mark.parametrize(
    ("prompts", "limits", "said"),
    (
        (((1,), (), (2,)), toys.LIMITS, "place 2"),
        (((1,), (2,), (3,) * 13), toys.LIMITS, "place 4"),
        (((1,), (2,), (3,) * 12), toys.LIMITS._replace(total=12), "place 4"),
    ),
    ids=("empty", "above the prompt limit", "no room for an answer"),
)
def test_a_prompt_out_of_bounds_is_refused(prompts, limits, said):
    """The message names the prompt's place, its length and what is allowed (A12)."""
    request = toys.REQUEST._replace(prompts=prompts, places=(0, 2, 4))
    with pytest.raises(base.UserError, match=said) as error:
        answer("off", toys.weights(), request=request, limits=limits)
    assert "allowed: 1 to " in str(error.value)


# Reports.


def sums(run: record.Rollout, field: str):
    return sum(getattr(b.report, field).astype(int) for b in run.blocks)


def round_counts(responses, told: bool) -> tuple[list[int], list[int], int]:
    """Count (accepted, tried, row rounds) longhand, for an oracle always or never right."""
    accepted, tried, row_rounds = [0] * DEPTH, [0] * DEPTH, 0
    for left in responses:
        while left:
            count = min(left, DEPTH + 1) if told else 1
            left -= count
            row_rounds += 1
            for i in range(DEPTH):
                accepted[i] += count > i + 1
                tried[i] += count > i + 1 or (count == i + 1 and left > 0)
    return accepted, tried, row_rounds


@pytest.mark.parametrize("stop", (toys.NEVER, toys.STOP))
@pytest.mark.parametrize(("text", "told"), ((CHAIN, True), (TREE, True), (CHAIN, False)))
def test_reports_count_what_was_accepted_and_tried(text, told, stop):
    """A draft that was cut off by a stop token or the limit was neither accepted nor judged."""
    whole = unstopped().batch
    limits = toys.LIMITS._replace(response=11)
    wanted = cut(whole, stop, limits)
    truth = whole.tokens if told else np.full_like(whole.tokens, toys.NEVER)
    run = answer(text, toys.weights(truth=truth), limits=limits, stop=stop)
    accepted, tried, row_rounds = round_counts(wanted.length - wanted.prompt_length, told)
    assert sums(run, "accepted")[:DEPTH].tolist() == accepted
    assert sums(run, "tried")[:DEPTH].tolist() == tried
    assert sums(run, "row_rounds") == row_rounds
    assert not sums(run, "accepted")[DEPTH:].any() and not sums(run, "tried")[DEPTH:].any()


@pytest.mark.parametrize(
    "text", ("off", CHAIN, TREE, "learned:3:3:8", "ngram:3:1:4", "oracle:3:1:4@1.6")
)
def test_reports_add_up_to_the_response(text):
    plain = toys.plain()
    run = answer(text, toys.told(plain, 0.6), stop=toys.STOP)
    said = run.batch.length - run.batch.prompt_length
    for b in run.blocks:
        r = b.report
        assert r.emitted == r.row_rounds + r.accepted.sum()
        assert r.rounds <= r.row_rounds <= r.rounds * b.live
        assert np.all(r.accepted <= r.tried) and np.all(r.tried[1:] <= r.accepted[:-1])
        assert r.tried[0] <= r.row_rounds
    assert sums(run, "emitted") == said.sum()
    s = record.statistics(run)
    assert s["spec/tokens_per_target_step"] == said.sum() / sums(run, "row_rounds")
    assert s["spec/live_rows_mean"] == sums(run, "row_rounds") / sums(run, "rounds")
    assert s["spec/off_fraction"] == (text == "off")
    assert ("spec/accept_length" in s) == (text != "off")
    if text != "off":
        assert s["spec/accept_length"] == s["spec/tokens_per_target_step"]
        rate = sums(run, "accepted")[1] / sums(run, "tried")[1]
        assert s["spec/accept_rate_pos_1"] == pytest.approx(rate)


def test_statistics_of_the_learned_drafter_are_of_its_own_rounds():
    controller = strategy.cycle((strategy.parse(CHAIN), strategy.parse("learned:3:1:4")))
    plain = unstopped()
    run = toys.rollout(toys.engine(stop=toys.NEVER), toys.told(plain), controller)
    learned = [b.report for b in run.blocks if b.strategy.drafter == "learned"]
    length = sum(int(r.emitted) for r in learned) / sum(int(r.row_rounds) for r in learned)
    assert record.statistics(run)["spec/accept_length"] == length < 4


# The schedule: one engine with a ladder of rows and of slots.


@dataclasses.dataclass
class Watched:
    """A rollout with the keys of the programs it ran, in order."""

    run: record.Rollout
    keys: list[tuple]


@pytest.fixture(scope="module")
def ladder():
    """Give roll(controller, ...) -> Watched on an engine of 2, 4 or 9 rows and 24 or 48 slots."""
    pool = pool_lib.Pool()
    patch = pytest.MonkeyPatch()
    keys = []
    call = pool_lib.call

    def watched(pool, key, *rest):
        keys.append(key)
        return call(pool, key, *rest)

    patch.setattr(pool_lib, "call", watched)

    def roll(
        controller,
        weights=None,
        settings=toys.SAMPLED,
        stop=toys.STOP,
        rounds=3,
        keep=False,
        look=lambda live: None,
    ):
        engine = engine_lib.make_engine(
            toys.SPEC,
            rows=LADDER,
            limits=toys.LIMITS,
            stop_tokens=(stop,),
            slot_step=24,
            rounds=rounds,
            span=toys.DEEPEST_SPAN,
        )
        engine.pool, engine.keep_finished = pool, keep
        pool.expected |= frozenset(engine_lib.programs(engine, controller))
        keys.clear()
        w = weights or toys.weights()
        run = toys.rollout(engine, w, controller, settings, look=look)
        return Watched(run, list(keys))

    roll.pool = pool
    yield roll
    patch.undo()


def _either(rows: int) -> tuple[base.DraftStrategy, ...]:
    return (base.PLAIN, strategy.parse("learned:3:3:8")) if rows > 2 else (base.PLAIN,)


def _by_turns(memory, now, rounds) -> strategy.Choice:
    choices = _either(now.bucket.rows)
    return strategy.Choice(choices[now.block % len(choices)], rounds)


PLAIN_OR_TREE = strategy.Controller("by turns", _either, _by_turns)


@pytest.mark.parametrize("rounds", (1, 2, 5, 40))
@pytest.mark.parametrize("settings", (toys.SAMPLED, inputs.Settings(0.7, 5, 0.8)), ids=str)
def test_compaction_and_growth_change_no_token(ladder, settings, rounds):
    """Rows move to smaller buckets and larger caches while the strategy changes (D7, D24)."""
    watched = ladder(PLAIN_OR_TREE, settings=settings, rounds=rounds)
    toys.assert_same(watched.run.batch, toys.plain(settings).batch)
    if settings == toys.SAMPLED and rounds < 5:
        assert {(b.rows, b.slots) for b in watched.run.blocks} >= {(9, 24), (4, 48), (2, 48)}


def test_an_empty_slot_of_a_bucket_adds_nothing(ladder):
    """Three rows in a bucket of four, the first row of the batch among them."""
    watched = ladder(toys.fixed("off"), weights=toys.weights(seed=0))
    said = watched.run.batch.length - watched.run.batch.prompt_length
    assert sums(watched.run, "emitted") == sums(watched.run, "row_rounds") == said.sum()
    assert (4, 3) in {(b.rows, b.live) for b in watched.run.blocks}
    assert said[0] == said.max()


def plain_schedule(rounds: int, keep: bool) -> list[tuple[int, int, int, int]]:
    """Work out (rows, slots, live, rounds) of each block of plain decoding, by hand."""
    batch = toys.plain().batch
    length, blocks, slots = batch.prompt_length.copy(), [], 24
    while (live := length < batch.length).any():
        rows = toys.ROWS if keep else min(r for r in LADDER if r >= live.sum())
        slots = max(slots, 24 if length[live].max() <= 24 else 48)
        enough = 0 if keep else max((r for r in LADDER if r < rows), default=0)
        n = 0
        while n < rounds and (length < batch.length).sum() > enough:
            now = length < batch.length
            if length[now].max() > slots:
                break
            length[now] += 1
            n += 1
        blocks.append((rows, slots, int(live.sum()), n))
    return blocks


@pytest.mark.parametrize("keep", (False, True))
@pytest.mark.parametrize("rounds", (1, 3, 40))
def test_blocks_end_when_rows_fit_a_smaller_bucket_or_slots_run_out(ladder, rounds, keep):
    """`keep_finished` never compacts and changes no token."""
    seen = []
    watched = ladder(toys.fixed("off"), rounds=rounds, keep=keep, look=seen.append)
    found = [(b.rows, b.slots, b.live, int(b.report.rounds)) for b in watched.run.blocks]
    assert found == plain_schedule(rounds, keep)
    assert seen == [b.live for b in watched.run.blocks]
    toys.assert_same(watched.run.batch, toys.plain().batch)
    assert len({b.rows for b in watched.run.blocks}) == (1 if keep else len(LADDER))


def test_a_strategy_of_larger_span_gets_the_slots_it_writes(ladder):
    """The tree of 8 nodes may start while its last node still fits, not later (D4)."""
    watched = ladder(toys.fixed("learned:3:3:8"), stop=toys.NEVER, rounds=40)
    toys.assert_same(watched.run.batch, unstopped().batch)
    small = [b for b in watched.run.blocks if b.slots == 24]
    longest = int(small[-1].report.length.max())
    assert 24 - 8 + 2 <= longest <= 24 - 8 + 1 + DEPTH + 1


def test_resize_takes_the_kept_rows_and_leaves_empty_slots_empty():
    """Whatever was in a row comes along; an empty slot works on no row, not on the first."""
    driver = toys.Driver(toys.told(unstopped()), stop=toys.NEVER)
    driver.block(CHAIN, 1)
    old = jax.device_get(driver.state)
    new = jax.device_get(decode.resize(driver.state, jnp.asarray([5, 2, toys.ROWS], jnp.int32), 52))
    assert new.rows.tolist() == [5, 2, toys.ROWS]
    jax.tree.map(np.testing.assert_array_equal, new.sequences, old.sequences)
    per_row = (old.cache, old.draft), (new.cache, new.draft)
    for before, after in zip(*map(jax.tree.leaves, per_row)):
        assert not after[2].any()
        if before.ndim == 4:  # heads before slots
            before, after = before.swapaxes(1, 2), after.swapaxes(1, 2)
        kept = before[np.array([5, 2])]
        if before.ndim > 2:
            assert after.shape[1] == 52 and not after[:, 48:].any()
            after = after[:, :48]
        np.testing.assert_array_equal(after[:2], kept)


def test_only_listed_programs_are_compiled_and_only_once(ladder):
    """After warm-up nothing compiles, whatever weights, settings and stop token (D22, F10)."""
    ladder(PLAIN_OR_TREE, rounds=2)
    ladder(PLAIN_OR_TREE, rounds=2, settings=inputs.Settings(0.7, 5, 0.8))
    compiled = len(ladder.pool.programs)
    assert compiled > 8 and ladder.pool.unexpected == 0
    new = toys.weights(seed=9)
    for settings in (toys.SAMPLED, inputs.Settings(0.7, 5, 0.8)):
        again = ladder(PLAIN_OR_TREE, rounds=2, settings=settings, weights=new, stop=3)
        wanted = toys.longhand(
            toys.CONFIG, new.policy, toys.REQUEST, settings, toys.LIMITS, 3, toys.GROUP
        )
        toys.assert_same(again.run.batch, wanted)
    assert ladder.pool.unexpected == 0
    listed = {key for key, _ in ladder.pool.programs}
    assert len(ladder.pool.programs) == len(listed)


def test_a_second_rollout_compiles_nothing(ladder):
    first = ladder(PLAIN_OR_TREE, rounds=3)
    compiled = list(ladder.pool.programs)
    second = ladder(PLAIN_OR_TREE, rounds=3)
    assert list(ladder.pool.programs) == compiled
    assert first.keys == second.keys
    toys.assert_same(first.run.batch, second.run.batch)


def test_the_learned_drafter_is_activated_when_it_takes_over(ladder):
    """Not at the start, where the prefill fed it, nor between two of its own blocks."""
    plain, tree = base.PLAIN, strategy.parse("learned:3:3:8")
    watched = ladder(
        strategy.cycle((tree, tree, plain, plain, tree, tree)), rounds=1, stop=toys.NEVER
    )
    steps = [
        key[0] if key[0] == "activate" else str(key[2])
        for key in watched.keys
        if key[0] in ("activate", "block")
    ]
    assert steps[:8] == [str(tree)] * 2 + ["off"] * 2 + ["activate"] + [str(tree)] * 3


def test_the_host_reads_the_device_once_per_block(monkeypatch):
    reads = []
    get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: reads.append(type(x)) or get(x))
    run = answer(CHAIN, toys.told(unstopped()), rounds=2)
    assert reads == [base.BlockReport] * len(run.blocks) + [base.Sequences]


def test_a_block_needs_nothing_of_the_host():
    """With all inputs on the device, transfers are forbidden and none happens."""
    driver = toys.Driver(toys.told(unstopped()), stop=toys.NEVER)
    stop = jnp.asarray([toys.NEVER], jnp.int32)
    shrink, rounds = jnp.int32(0), jnp.int32(2)
    driver.block(CHAIN, 1)
    key, choice = ("block", driver.bucket, strategy.parse(CHAIN)), strategy.parse(CHAIN)
    args = (driver.weights, driver.sample, stop, driver.state, shrink, rounds)
    with jax.transfer_guard("disallow"):
        state, report = pool_lib.call(
            driver.engine.pool, key, decode.decode_block, {0: toys.SPEC, 1: choice}, *args
        )
    assert report.rounds == 2 and state.sequences.length.shape == (toys.ROWS,)


def compiled_block(choice: str, rows: int, slots: int):
    """Compile a block of a model whose caches outweigh all else; returns it and its state."""
    config = base.PolicyConfig(
        vocab=64, hidden=192, layers=2, heads=3, kv_heads=3, head_dim=64, ffn=64,
        max_positions=4096, dtype="float32",
    )  # fmt: skip
    head = eagle.config_for(config, "fastgrpo")
    spec = dataclasses.replace(toys.SPEC, policy=config, eagle=head)
    like = toys.Driver(toys.told(unstopped()), stop=toys.NEVER)
    sequences = like.state.sequences
    state = jax.eval_shape(
        lambda: decode.empty_state(spec, base.Bucket(rows, slots), sequences)
    )._replace(sequences=sequences)
    params = tiny.params(config, 0)
    weights = speculate.Weights(params, eagle.init(jax.random.key(0), head), tau=jnp.float32(1))
    args = (weights, like.sample, jnp.asarray([toys.NEVER]), state, jnp.int32(0), jnp.int32(2))
    return decode.decode_block.lower(spec, strategy.parse(choice), *args).compile(), state


@pytest.mark.parametrize("choice", ("off", "learned:2:1:3", "learned:2:2:4", "learned:2:1:3@1.5"))
def test_a_block_updates_every_cache_in_place(choice):
    """Temporaries grow with the slots by less than one layer's keys: no cache is copied."""
    rows, few, many = 4, 256, 1024
    (small, _), (large, state) = (compiled_block(choice, rows, s) for s in (few, many))
    held, before = large.memory_analysis(), small.memory_analysis()
    keys = base.tree_bytes(state.cache.k[0]) * (many - few) // many
    assert held.temp_size_in_bytes - before.temp_size_in_bytes < keys
    assert held.alias_size_in_bytes >= base.tree_bytes((state.cache, state.draft))  # donated


def test_a_look_that_raises_stops_the_rollout(ladder):
    class Enough(Exception):
        pass

    def look(live):
        if live < toys.ROWS:
            raise Enough

    with pytest.raises(Enough):
        ladder(toys.fixed("off"), rounds=2, look=look)


def test_an_engine_is_laid_out_for_its_limits():
    """Slots hold the last round of the longest sequence; prompts are whole chunks."""
    for limits, span in ((engine_lib.Limits(12, 22, 32), 12), (engine_lib.Limits(17, 3, 20), 1)):
        engine = engine_lib.make_engine(
            toys.SPEC, rows=(2, 6), limits=limits, stop_tokens=(), slot_step=4, span=span
        )
        assert engine.slots == buckets.slot_ladder(limits.total - 1 + span, 4)
        assert engine.slots[-1] >= limits.total - 1 + span
        assert engine.prompt_slots == -(-limits.prompt // 8) * 8
        assert (engine.rows, engine.max_length) == ((2, 6), limits.total)


@pytest.mark.parametrize("spec", (toys.SPEC, dataclasses.replace(toys.SPEC, eagle=None)), ids=str)
def test_no_block_is_compiled_after_a_warm_up(spec):
    engine = engine_lib.make_engine(
        spec, rows=LADDER, limits=toys.LIMITS, stop_tokens=(toys.STOP,), slot_step=48,
        rounds=3, span=toys.DEEPEST_SPAN,
    )  # fmt: skip
    text = "learned:2:1:3" if spec.eagle else "ngram:2:1:3"
    controller = strategy.cycle((base.PLAIN, strategy.parse(text)))
    engine.pool.expected = frozenset(engine_lib.programs(engine, controller))
    weights = toys.weights(spec)
    engine_lib.warm_up(engine, weights, controller, threads=2)
    warm = {key for key, _ in engine.pool.programs}
    assert warm == {key for key in engine.pool.expected if key[0] == "block"}
    run = toys.rollout(engine, weights, controller)
    toys.assert_same(run.batch, toys.plain().batch)
    new = {key[0] for key, _ in engine.pool.programs if key not in warm}
    assert "block" not in new and engine.pool.unexpected == 0
    assert len([key for key, _ in engine.pool.programs if key[0] == "block"]) == len(warm)


def test_of_several_clocks_one_is_remembered_and_none_decides_meanwhile():
    """A controller sees no time within the rollout; afterwards it has those that are agreed on,
    in place of its own, as if each block had been observed with them."""
    seen = []

    def observe(memory, outcome):
        seen.append(outcome.seconds)
        return memory | {"clock": memory.get("clock", 0.0) + outcome.seconds}

    controller = toys.fixed("learned:3:1:4")._replace(observe=observe)
    own = []

    def agree(mine):
        own.extend(mine)
        return [float(i) for i in range(len(mine))]

    made = toys.engine(rounds=2)
    run = toys.rollout(made, toys.weights(), controller, memory={"clock": 100.0}, agree=agree)
    blocks = len(run.blocks)
    assert blocks > 2 and len(own) == blocks
    assert np.isnan(seen[:blocks]).all() and seen[blocks:] == [*map(float, range(blocks))]
    assert run.memory == {"clock": 100.0 + sum(range(blocks))}
    toys.assert_same(run.batch, toys.plain().batch)
