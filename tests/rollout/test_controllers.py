"""Adaptive controllers against a simulated machine: what they reach, lose and how they recover."""

import json
import random

import pytest

from fastgrpo_jax import base
from fastgrpo_jax.rollout import bandit, costs, goodput, strategy

OFF = base.PLAIN
SHORT, LONG = strategy.parse("learned:1:1:2"), strategy.parse("learned:4:1:5")
TREE, NGRAM = strategy.parse("learned:3:2:6"), strategy.parse("ngram:3:1:4")
ARMS = (SHORT, LONG, TREE, NGRAM)
ROUNDS = 16


class World:
    """A machine on which a block's tokens and seconds follow from rates and costs, with noise."""

    def __init__(self, cost, rates, noise=0.0, seed=0):
        self.cost, self.rates, self.noise = cost, rates, noise
        self.random = random.Random(seed)

    def tokens(self, choice) -> float:
        return costs.tokens_at(choice, self.rates[choice.drafter]) if choice.depth else 1.0

    def value(self, choice) -> float:
        return self.tokens(choice) / self.cost[choice]

    def block(self, now, choice, rounds) -> strategy.Outcome:
        """Play a block: every row's drafts fall as they would."""
        rate = self.rates.get(choice.drafter, 0.0)
        rate = rate if choice.chain else costs.widened(rate, choice)
        accepted, tried, emitted = [0] * 8, [0] * 8, 0
        for _ in range(rounds * now.live):
            emitted += 1
            for j in range(choice.depth):
                tried[j] += 1
                if self.random.random() >= rate:
                    break
                accepted[j] += 1
                emitted += 1
        seconds = rounds * self.cost[choice] * (1 + self.noise * self.random.random())
        rows = rounds * now.live
        return strategy.Outcome(
            now, choice, rounds, rows, emitted, tuple(accepted), tuple(tried), seconds
        )


def play(controller, world, blocks, memory=None, rows=8):
    """Play blocks; returns the memory, the choices, and tokens/s over the best choice's."""
    memory, chosen, tokens, seconds = memory or {}, [], 0, 0.0
    now = strategy.Situation(base.Bucket(rows, 96), rows, 0)
    for _ in range(blocks):
        choice, rounds = controller.choose(memory, now, ROUNDS)
        outcome = world.block(now, choice, rounds)
        memory = controller.observe(memory, outcome)
        chosen.append(choice)
        tokens, seconds = tokens + outcome.emitted, seconds + outcome.seconds
    best = max(world.value(s) for s in world.cost) * rows
    return memory, chosen, tokens / seconds / best


def flat(scale=1.0):
    return {OFF: 1.0, SHORT: 1.3 * scale, LONG: 2.0 * scale, TREE: 2.2 * scale, NGRAM: 1.8 * scale}


def made(cost, **settings):
    settings = goodput.Settings(**settings)
    return goodput.controller(lambda rows: ARMS, lambda bucket, s: cost[s], settings)


@pytest.mark.parametrize("rate, best", [(0.9, LONG), (0.5, SHORT), (0.05, OFF)])
def test_goodput_settles_on_the_best_choice_and_loses_little(rate, best):
    world = World(flat(), {"learned": rate, "ngram": rate / 2})
    memory, chosen, first = play(made(flat()), world, 60)
    assert max((*ARMS, OFF), key=world.value) == best
    _, chosen, share = play(made(flat()), world, 300, memory)
    assert chosen.count(best) > 0.7 * len(chosen)
    assert share > 0.97 and first > 0.9


def test_goodput_never_costs_more_than_its_exploration_when_nothing_pays():
    """Law 2: an untrained drafter, from the very first block."""
    world = World(flat(), {"learned": 0.0, "ngram": 0.0}, noise=0.1)
    _, chosen, share = play(made(flat()), world, 400)
    assert chosen.count(OFF) > 380
    assert share > 0.97 / 1.05  # the noise adds 5 % to every block's time


def test_what_is_not_known_yet_is_tried_briefly():
    controller = made(flat(), trial_rounds=3, known=16.0, explore=0.0)
    now = strategy.Situation(base.Bucket(8, 96), 8, 0)
    choice, rounds = controller.choose({}, now, ROUNDS)
    assert choice.depth and rounds == 3
    world = World(flat(), {"learned": 0.9, "ngram": 0.1})
    memory = controller.observe({}, world.block(now, choice, rounds))
    assert controller.choose(memory, now, ROUNDS).rounds == ROUNDS


def test_goodput_finds_a_table_that_was_wrong():
    """The table says that chains are cheap; the blocks' own times say otherwise."""
    told = flat() | {LONG: 0.5}
    world = World(flat(), {"learned": 0.2, "ngram": 0.1})
    memory, _, _ = play(made(told), world, 20)
    _, chosen, share = play(made(told), world, 200, memory)
    assert chosen.count(OFF) > 180 and share > 0.97


def test_goodput_recovers_when_acceptance_collapses():
    """Within 4 blocks: a block that contradicts what was counted puts an end to its counting."""
    cost = flat()
    controller = made(cost)
    good = World(cost, {"learned": 0.9, "ngram": 0.2})
    memory, chosen, _ = play(controller, good, 100)
    assert chosen[-1] == LONG
    bad = World(cost, {"learned": 0.05, "ngram": 0.05})
    memory, chosen, _ = play(controller, bad, 30, memory)
    assert LONG not in chosen[4:] and chosen[4:].count(OFF) > 20, [str(s) for s in chosen]


def test_goodput_counts_the_drafts_of_some_rounds_but_none_that_are_contradicted():
    controller = made(flat(), window=100.0, window_rounds=32.0, known=8.0)

    def seen(memory, rows, accepted, tried):
        now = strategy.Situation(base.Bucket(rows, 96), rows, 0)
        rounds = tried // rows
        outcome = strategy.Outcome(
            now, SHORT, rounds, tried, tried + accepted, (accepted,), (tried,), 1.0
        )
        return controller.observe(memory, outcome)

    def counts(memory):
        found = memory["drafts"]["learned:1"]  # all buckets' together
        return found["accepted"][0], found["tried"][0]

    memory = {}
    for _ in range(20):
        memory = seen(memory, 1, 25, 50)
    assert counts(memory) == pytest.approx((50, 100), rel=1e-4)  # fewer than 32 rounds' drafts
    for _ in range(20):
        memory = seen(memory, 8, 64, 128)
    assert counts(memory) == pytest.approx((128, 256), rel=1e-4)  # 32 rounds of 8 rows
    memory = seen(memory, 8, 76, 128)  # .59 of 128 instead of .5: may be chance
    assert counts(memory)[1] == pytest.approx(256, rel=1e-4)
    memory = seen(memory, 8, 0, 128)
    assert counts(memory)[1] == pytest.approx(8 + 128, rel=1e-4)
    assert counts(memory)[0] / counts(memory)[1] < 0.05


def test_goodput_recovers_when_costs_change():
    """Of 7 kept times the median turns after 4 blocks; the old ones are hoped for in trials."""
    controller = made(flat())
    rates = {"learned": 0.9, "ngram": 0.2}
    memory, chosen, _ = play(controller, World(flat(), rates), 100)
    assert chosen[-1] == LONG
    slow = flat() | {SHORT: 9.0, LONG: 9.0, TREE: 9.0}
    memory, chosen, _ = play(controller, World(slow, rates), 30, memory)
    assert chosen[4:].count(LONG) <= 3 and chosen.count(OFF) > 15, [str(s) for s in chosen]


def test_goodput_looks_again_after_the_weights_changed():
    """A drafter that was useless and has learned is found while plain decoding goes on."""
    controller = made(flat())
    memory, chosen, _ = play(controller, World(flat(), {"learned": 0.0, "ngram": 0.0}), 100)
    assert chosen[-1] == OFF
    world, steps = World(flat(), {"learned": 0.9, "ngram": 0.0}), 0
    while chosen[-1] != LONG:
        memory, chosen, _ = play(controller, world, 40, controller.renew(memory))
        steps += 1
        assert steps < 20
    assert steps <= 12


def test_frozen_timing_looks_at_no_clock():
    """Law 6: two machines of different speed decide alike from the same table and drafts."""
    found = []
    for scale in (1.0, 7.0):
        rates = {"learned": 0.7, "ngram": 0.3}
        cost = {s: x * scale for s, x in flat().items()}
        controller = made(flat(), frozen=True)
        found.append(play(controller, World(cost, rates), 100)[:2])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "controller",
    [made(flat()), bandit.controller(lambda rows: ARMS), strategy.constant("fixed", LONG)],
    ids=lambda c: c.name,
)
def test_a_memory_survives_json_exactly(controller):
    """Law 6: it is what a checkpoint keeps."""
    world = World(flat(), {"learned": 0.7, "ngram": 0.3}, noise=0.2)
    memory = controller.renew(play(controller, world, 50)[0])
    again = json.loads(json.dumps(memory))
    assert again == memory
    after = [play(controller, World(flat(), world.rates), 20, m)[:2] for m in (memory, again)]
    assert after[0] == after[1]


@pytest.mark.parametrize(
    "controller", [made(flat()), bandit.controller(lambda rows: ARMS)], ids=lambda c: c.name
)
def test_adaptive_controllers_choose_only_what_they_said_they_might(controller):
    world = World(flat(), {"learned": 0.5, "ngram": 0.5}, noise=0.5)
    _, chosen, _ = play(controller, world, 300)
    assert set(chosen) <= set(controller.possible(8)) and len(set(chosen)) > 2


def test_the_bandit_settles_on_the_largest_median_and_explores_by_epsilon():
    world = World(flat(), {"learned": 0.9, "ngram": 0.2}, noise=0.1)
    controller = bandit.controller(lambda rows: ARMS)
    _, chosen, _ = play(controller, world, 400)
    assert set(chosen[:8]) >= {*ARMS, OFF} - {NGRAM}  # untried ones first
    late = chosen[100:]
    assert 0.85 < late.count(LONG) / len(late) < 0.97
    never = bandit.controller(lambda rows: ARMS, epsilon=0.0)
    _, chosen, _ = play(never, world, 50)
    assert set(chosen[5:]) == {LONG} and set(chosen) == {*ARMS, OFF}


def test_the_bandit_recovers_when_acceptance_collapses():
    """With a window of 20 its median turns after 10 blocks of the choice."""
    controller = bandit.controller(lambda rows: ARMS, window=20, epsilon=0.1)
    memory, chosen, _ = play(controller, World(flat(), {"learned": 0.9, "ngram": 0.2}), 100)
    assert chosen[-1] == LONG
    bad = World(flat(), {"learned": 0.05, "ngram": 0.05})
    memory, chosen, _ = play(controller, bad, 60, memory)
    assert chosen[30:].count(LONG) < 5 and chosen[30:].count(OFF) > 20


def test_the_bandits_groups_give_few_rows_many_tokens():
    strategies = [strategy.parse(x) for x in ("learned:2:2:4", "learned:4:4:12", "learned:5:6:24")]
    arms = bandit.by_tokens([*strategies, strategy.parse("learned:3:1:4")])
    assert arms(1) == (strategies[2],) and arms(2) == (strategies[1],)
    assert arms(5) == arms(6) == arms(100) == (strategies[0], strategy.parse("learned:3:1:4"))
    assert bandit.by_tokens([])(4) == ()
    assert len(bandit.controller(arms).possible(1)) == 2  # at least two: off is one


TABLE = costs.Table("toy", {1: 1.0, 8: 1.5, 64: 6.0, 256: 24.0}, {1: 0.1, 64: 0.4}, {})


def test_a_round_costs_its_tokens_and_its_drafted_levels():
    def cost(rows, text):
        return costs.seconds(TABLE, base.Bucket(rows, 96), strategy.parse(text))

    assert cost(1, "off") == 1.0 and cost(8, "off") == 1.5
    assert cost(8, "ngram:7:1:8") == 6.0  # 64 tokens
    assert cost(1, "learned:7:1:8") == pytest.approx(1.5 + 7 * 0.1)
    assert cost(32, "learned:3:2:8") == pytest.approx(24.0 + 3 * 0.4)
    assert cost(128, "ngram:3:1:4") == pytest.approx(48.0)  # beyond the curve: by tokens
    middle = cost(24, "off")  # straight in log-log from 8 to 64
    assert middle == pytest.approx(1.5 * (6.0 / 1.5) ** (1.0986122887 / 2.0794415417))


def test_rows_of_their_own_cost_their_caches_whatever_they_verify():
    table = TABLE._replace(rows={1: 1.0, 8: 2.5, 64: 14.0})

    def extra(rows, text, table=table):
        bucket, choice = base.Bucket(rows, 96), strategy.parse(text)
        return costs.seconds(table, bucket, choice) - costs.seconds(TABLE, bucket, choice)

    assert extra(1, "off") == 0.0
    assert extra(8, "off") == extra(8, "learned:3:2:8") == 1.0  # 2.5 where one row takes 1.5
    assert extra(36, "off") == extra(36, "ngram:3:1:4") == pytest.approx(4.5)  # from 1 to 8
    assert extra(128, "off") == 16.0  # beyond the last: by rows
    assert extra(8, "off", table._replace(rows={1: 1.0, 8: 1.2})) == 0.0  # measured unluckily


def test_the_table_gives_the_knee():
    assert costs.c_peak(TABLE) == 64
    assert costs.c_peak(TABLE._replace(forward={1: 1.0, 2: 1.0, 4: 2.0})) == 2


def test_choices_are_what_could_be_best_and_nothing_where_nothing_pays():
    few = costs.arms(TABLE, 1, ("learned", "ngram"))
    many = costs.arms(TABLE, 256, ("learned", "ngram"))
    # Every token costs the same there, but what finished rows would cost may go into drafts.
    assert many and all(s.share for s in many)
    steep = TABLE._replace(forward={1: 1.0, 4096: 4096.0**2})
    assert costs.arms(steep, 256, ("learned", "ngram")) == ()
    assert {s.drafter for s in few} == {"learned", "ngram"}
    assert max(s.nodes for s in few) > max(s.nodes for s in costs.arms(TABLE, 16, ("learned",)))
    for drafter in ("learned", "ngram"):
        mine = [s for s in few if s.drafter == drafter]
        assert len(mine) <= 5
        for level in costs.LEVELS:
            value = {
                s: costs.tokens_at(s, level) / cost_of(s) for s in costs.candidates(drafter, 1)
            }
            if max(value.values()) > 1 / cost_of(OFF):
                assert max(value[s] for s in mine) >= 0.97 * max(value.values()), level
        for s in mine:  # and none is there that the others could stand in for
            others = [x for x in mine if x != s]
            assert not covers(others, drafter), s


def covers(some, drafter):
    for level in costs.LEVELS:
        value = {s: costs.tokens_at(s, level) / cost_of(s) for s in costs.candidates(drafter, 1)}
        best = max(value.values())
        if best > 1 / cost_of(OFF) and not any(value[s] >= 0.97 * best for s in some):
            return False
    return True


def cost_of(choice):
    return costs.seconds(TABLE, base.Bucket(1, 0), choice)


def test_expected_tokens_of_a_chain_are_a_geometric_sum():
    assert costs.tokens_at(LONG, 0.5) == 1 + 0.5 + 0.25 + 0.125 + 0.0625
    assert costs.tokens_at(OFF, 0.5) == 1.0
    assert costs.tokens_at(TREE, 0.5) > costs.tokens_at(strategy.parse("learned:3:1:4"), 0.5)


def test_goodput_counts_by_depth_and_draws_to_the_prior():
    settings = goodput.Settings(prior=0.5, prior_weight=4.0)
    now = strategy.Situation(base.Bucket(8, 96), 8, 0)
    assert goodput.expected_tokens({}, OFF, settings, now) == 1.0
    assert goodput.expected_tokens({}, SHORT, settings, now) == 1.5
    drafts = {"learned:1": {"accepted": [96, 10], "tried": [96, 20]}}
    a, b = (96 + 2) / 100, (10 + 4 * 0.98) / 24
    chain = strategy.parse("learned:2:1:3")
    found = goodput.expected_tokens({"drafts": drafts}, chain, settings, now)
    assert found == pytest.approx(1 + a + a * b)
    drafts["learned:1/8"] = {"accepted": [16, 4], "tried": [64, 16]}  # here it is otherwise
    drafts["learned:1/4"] = {"accepted": [64, 64], "tried": [64, 64]}  # another bucket's rows
    here, deep = (16 + 32 * a) / 96, (4 + 32 * b) / 48
    found = goodput.expected_tokens({"drafts": drafts}, chain, settings, now)
    assert found == pytest.approx(1 + here + here * deep)


def test_shared_drafts_count_by_what_rows_got_drawn_to_what_chains_promise():
    settings = goodput.Settings(prior=0.5, prior_weight=4.0)
    choice = strategy.parse("learned:2:1:3@1.5")  # 12 of 8 rows' 24 nodes
    chains = {"accepted": [796, 396], "tried": [996, 496]}  # .8 each, with the prior's 4

    def expected(live, own=None, hope=0.0):
        now = strategy.Situation(base.Bucket(8, 96), live, 0)
        drafts = {"learned:1": chains} | ({f"{choice}/8": own} if own else {})
        return goodput.expected_tokens({"drafts": drafts}, choice, settings, now, hope)

    a, b = 798 / 1000, (396 + 4 * 0.798) / 500
    assert expected(8) == pytest.approx(1 + 0.5 * a)  # half a draft a row, the first
    assert expected(6) == pytest.approx(1 + a)  # a finished row leaves its drafts to the others
    assert expected(4) == pytest.approx(1 + a + a * b)
    own = {"accepted": [30.0, 6.0], "tried": [40.0, 10.0], "rows": 80.0}
    right = (36 + 4 * 0.5 * a) / 84
    assert expected(8, own) == pytest.approx(1 + right)
    assert expected(8, own, hope=2.0) == pytest.approx(
        1 + right + 2 * (right * (1 + right) / 84) ** 0.5
    )


def test_a_share_costs_the_tokens_it_verifies_and_is_weighed_with_some_rows_only():
    choice = strategy.parse("learned:3:1:4@1.5")
    assert [choice.total(rows) for rows in (1, 2, 3, 8, 64)] == [2, 3, 4, 12, 96]
    assert strategy.parse("learned:3:1:4").total(8) == 32
    bucket = base.Bucket(32, 96)
    whole = costs.seconds(TABLE, bucket, strategy.parse("ngram:1:1:2"))  # 64 tokens
    assert costs.seconds(TABLE, bucket, strategy.parse("ngram:3:1:4@2")) == whole * costs.PACKED
    assert costs.spread([0.5, 0.25, 0.125], 1.5) == 0.5 + 0.125
    assert costs.spread([0.5], 3.0) == 0.5 and costs.spread([0.5], 0.0) == 0.0
    assert costs.tokens_at(choice, 0.5) == 1 + 0.25
    assert costs.tokens_at(choice, 0.5, live=0.75) == 1 + 0.5  # a draft for each that lives
    assert not any(s.share for s in costs.candidates("learned", 2))
    assert any(s.share for s in costs.candidates("ngram", 8))


def test_goodput_counts_what_rows_that_share_their_drafts_get():
    choice = strategy.parse("learned:2:1:3@1.5")
    controller = goodput.controller(lambda rows: (choice,), lambda b, s: 1.0 + s.depth / 10)
    now = strategy.Situation(base.Bucket(8, 96), 8, 0)
    outcome = strategy.Outcome(now, choice, 4, 32, 50, (14, 4), (14, 5), 4.0)
    memory = controller.observe({}, outcome)
    assert memory["drafts"] == {
        "learned:2:1:3@1.5/8": {"accepted": [14, 4], "tried": [14, 5], "rows": 32.0}
    }
    half = controller.renew(memory)["drafts"]["learned:2:1:3@1.5/8"]
    assert half == {"accepted": [7, 2], "tried": [7, 2.5], "rows": 16.0}


def test_a_table_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "a" / "costs.json"
    assert costs.load(path) is None
    for table in (TABLE, TABLE._replace(rows={1: 1.0, 8: 2.5})):
        costs.save(path, table)
        assert costs.load(path) == table
    path.write_text('{"device": "x", "forward": {"1": 0.0}, "draft": {}}')
    with pytest.raises(base.UserError, match=r"costs\.json holds no positive seconds"):
        costs.load(path)
    path.write_text('{"forward": 3}')
    with pytest.raises(base.UserError, match=r"costs\.json is no cost table"):
        costs.load(path)
    lines = costs.describe(TABLE, (1, 256), ("learned",)).splitlines()
    assert "C_peak 64" in lines[0] and lines[1] == "1 rows: off 1000.0 ms"
    assert "256 rows: off 24000.0 ms" in lines


def test_goodput_finds_by_trial_what_its_prior_does_not_promise():
    """At the prior of .5 nothing pays; only trials show that this drafter is right nine in ten."""
    dear = flat() | {SHORT: 1.7, TREE: 3.0, NGRAM: 3.0}
    world = World(dear, {"learned": 0.9, "ngram": 0.1})
    _, chosen, _ = play(made(dear), world, 300)
    assert chosen[-1] == LONG
    _, chosen, _ = play(made(dear, explore=0.0), world, 300)
    assert set(chosen) == {OFF}


def test_what_a_drafters_blocks_say_of_the_table_holds_for_its_other_strategies():
    """Three times the table's seconds for one chain: a tree of that drafter is expected so too."""
    bucket = base.Bucket(8, 96)
    now = strategy.Situation(bucket, 8, 0)
    controller = made(flat())
    seen = strategy.Outcome(now, LONG, 2, 16, 30, (8, 4), (16, 8), 2 * 3.0 * flat()[LONG])
    memory = controller.observe({}, seen)

    def cost(bucket, s):
        return flat()[s]

    assert goodput._seconds(memory, cost, bucket, LONG) == pytest.approx(6.0)
    assert goodput._seconds(memory, cost, bucket, TREE) == pytest.approx(6.6)
    assert goodput._seconds(memory, cost, bucket, NGRAM) == 1.8
    assert goodput._seconds(memory, cost, base.Bucket(4, 96), LONG) == pytest.approx(6.0)


@pytest.mark.parametrize("slow", [1, 2])
def test_goodput_forgives_a_choice_its_first_slow_blocks(slow):
    """A neighbour's load during a trial must not put the best choice out for good."""
    world = World(flat(), {"learned": 0.9, "ngram": 0.1})
    controller, memory, chosen, runs = made(flat()), {}, [], dict.fromkeys((*ARMS, OFF), 0)
    now = strategy.Situation(base.Bucket(8, 96), 8, 0)
    for _ in range(300):
        choice, rounds = controller.choose(memory, now, ROUNDS)
        outcome = world.block(now, choice, rounds)
        runs[choice] += 1
        if choice.depth and runs[choice] <= slow:
            outcome = outcome._replace(seconds=outcome.seconds * 5)
        memory = controller.observe(memory, outcome)
        chosen.append(choice)
    assert chosen[-100:].count(LONG) > 75, [str(s) for s in chosen[-100:]]


@pytest.mark.parametrize(
    "controller", [made(flat()), bandit.controller(lambda rows: ARMS)], ids=lambda c: c.name
)
def test_the_first_run_of_a_program_is_no_measure_of_its_speed(controller):
    now = strategy.Situation(base.Bucket(8, 96), 8, 0)
    outcome = World(flat(), {"learned": 0.9, "ngram": 0.1}).block(now, LONG, ROUNDS)
    memory = controller.observe({}, outcome._replace(seconds=float("nan")))
    assert "times" not in memory and "rewards" not in memory
    assert "NaN" not in json.dumps(memory)
