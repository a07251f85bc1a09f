import pytest

from fastgrpo_jax import base
from fastgrpo_jax.rollout import strategy

DEFAULTS = dict(n_max=160, depth_max=5, width_max=8, alpha=0.75, drafter="learned")


def rule(rows, c_peak, **limits):
    s = strategy.fastgrpo_strategy(rows, c_peak, **(DEFAULTS | limits))
    return s.nodes, s.depth, s.width


@pytest.mark.parametrize(
    "rows, expected",
    [
        (1, (160, 5, 8)),
        (2, (80, 5, 8)),
        (3, (53, 5, 8)),
        (4, (40, 5, 8)),
        (8, (20, 4, 8)),
        (16, (10, 3, 8)),
        (32, (5, 2, 4)),
        (53, (3, 2, 2)),
        (64, (2, 1, 1)),
        (80, (2, 1, 1)),
        (81, (1, 0, 1)),
        (160, (1, 0, 1)),
        (161, (1, 0, 1)),
        (1000, (1, 0, 1)),
    ],
)
def test_the_schedule_at_c_peak_160_is_the_papers(rows, expected):
    """D19: floor(C / B) tokens per row, depth log2(N / 0.75) up to 5, N - 1 children up to 8."""
    assert rule(rows, 160) == expected


def test_the_schedules_limits_bind():
    assert rule(1, 160, n_max=64) == (64, 5, 8)
    assert rule(1, 160, depth_max=3) == (137, 3, 8)  # 8 + 64 * 2 candidates and the root
    assert rule(1, 160, depth_max=1) == (9, 1, 8)
    assert rule(4, 160, width_max=2) == (19, 5, 2)  # 2 + 4 * 4 candidates and the root
    assert rule(4, 160, width_max=1) == (6, 5, 1)
    assert rule(8, 160, alpha=1.5) == (20, 3, 8)
    assert rule(32, 160, alpha=100.0) == (5, 1, 4)
    assert rule(1, 1) == rule(2, 3) == (1, 0, 1)


@pytest.mark.parametrize("drafter", ["learned", "ngram"])
@pytest.mark.parametrize("limits", [{}, dict(n_max=7, depth_max=2, width_max=3, alpha=1.0)])
def test_the_schedule_is_valid_and_in_budget_for_any_concurrency_and_machine(drafter, limits):
    """D19: a larger batch never gets more tokens per row; nothing above C_peak is asked for."""
    limits = DEFAULTS | limits | dict(drafter=drafter)
    for c_peak in range(1, 301):
        before = 10**9
        for rows in (*range(1, c_peak // 2 + 3), 300):  # beyond c_peak / 2 it is always plain
            s = strategy.fastgrpo_strategy(rows, c_peak, **limits)
            assert s.nodes <= before
            before = s.nodes
            if c_peak // rows < 2:
                assert s == base.PLAIN
                continue
            assert s.drafter == drafter and s.depth >= 1
            assert s.nodes * rows <= c_peak and s.nodes <= limits["n_max"]
            assert s.depth <= limits["depth_max"] and s.width <= limits["width_max"]
            assert drafter == "learned" or (s.chain and s.nodes == s.depth + 1)


def test_a_small_alpha_drafts_no_deeper_than_its_nodes_reach():
    assert rule(80, 160, alpha=0.5) == (2, 1, 1)
    assert rule(32, 160, alpha=0.1) == (5, 4, 4)


def test_the_ngram_drafter_gets_a_chain_of_what_is_left():
    assert rule(1, 160, drafter="ngram") == (6, 5, 1)
    assert rule(40, 160, drafter="ngram") == (4, 3, 1)
    assert rule(80, 160, drafter="ngram") == (2, 1, 1)
    assert rule(81, 160, drafter="ngram") == (1, 0, 1)


@pytest.mark.parametrize(
    "text", ["off", "learned:3:2:6", "ngram:4:1:5", "oracle:3:2:7", "learned:3:1:4@1.5"]
)
def test_a_strategy_reads_as_it_is_written(text):
    assert str(strategy.parse(text)) == text


def test_a_parsed_strategy_has_the_numbers_in_their_places():
    assert strategy.parse("learned:3:2:6") == base.DraftStrategy("learned", 3, 2, 6)
    assert strategy.parse("ngram:3:1:4@2") == base.DraftStrategy("ngram", 3, 1, 4, 2.0)
    assert strategy.parse("off") == base.PLAIN == base.DraftStrategy("off", 0, 1, 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "on",
        "Off",
        "learned",
        "learned:3",
        "learned:3:2",
        "learned:3:2:6:1",
        "eagle:3:2:6",
        "off:1:1:2",
        "learned:0:1:1",
        "learned:²:1:3",
        "learned:-3:2:6",
        "learned:3:2:x",
        "learned:3:2:6.0",
        "learned: 3:2:6",
        "learned:::",
        "learned:3:0:4",
        "learned:3:2:3",  # fewer nodes than levels
        "learned:3:2:12",  # more than 2 + 4 + 4 and the root
        "learned:3:1:5",
        "ngram:3:2:6",
        "learned:3:2:6@2",  # a share is for chains
        "learned:3:1:4@1",
        "learned:3:1:4@4",
        "learned:3:1:4@",
        "learned:3:1:4@0",
        "learned:3:1:4@x",
        "learned:3:1:4@-2",
        "off@2",
    ],
)
def test_a_strategy_that_is_none_is_refused_by_name(text):
    with pytest.raises(base.UserError) as error:
        strategy.parse(text)
    assert text in str(error.value)


def test_a_trees_nodes_lie_between_a_chain_and_the_whole_pool():
    for depth, width, low, high in ((1, 1, 2, 2), (1, 8, 2, 9), (3, 2, 4, 11), (5, 8, 6, 265)):
        for nodes in (low, high):
            assert base.DraftStrategy("learned", depth, width, nodes).nodes == nodes
        for nodes in (low - 1, high + 1):
            with pytest.raises(base.UserError, match=str(high)):
                base.DraftStrategy("learned", depth, width, nodes)
    with pytest.raises(base.UserError):
        base.DraftStrategy("off", 0, 1, 2)


def test_a_strategys_span_covers_the_tree_the_chain_and_the_drafters_scratch():
    """D4: the slots that a round needs beyond the row's verified ones."""
    spans = {"off": 1, "learned:2:1:3": 3, "learned:5:8:6": 32, "learned:2:3:12": 12}
    assert {text: strategy.parse(text).span for text in spans} == spans


def chosen(controller, rows, block):
    now = strategy.Situation(base.Bucket(rows, 48), rows, block)
    choice, rounds = controller.choose({}, now, 16)
    assert rounds == 16 and controller.observe({}, None) == controller.renew({}) == {}
    return choice


def test_controllers_choose_only_what_they_said_they_might():
    """D22: what is not on the list would be an unexpected compilation."""
    a, b = strategy.parse("learned:2:1:3"), strategy.parse("ngram:4:1:5")
    fixed = strategy.constant("fixed", a)
    cycle = strategy.cycle((a, b, base.PLAIN, a))
    schedule = strategy.fastgrpo(160, **DEFAULTS)
    assert (fixed.name, cycle.name, schedule.name) == ("fixed", "cycle", "fastgrpo")
    for rows in (1, 7, 64, 200):
        for controller in (fixed, cycle, schedule):
            assert {chosen(controller, rows, block) for block in range(9)} == set(
                controller.possible(rows)
            )
    assert [chosen(cycle, 8, block) for block in range(5)] == [a, b, base.PLAIN, a, a]
    assert chosen(schedule, 16, 3) == base.DraftStrategy("learned", 3, 8, 10)


def test_the_knee_is_the_smallest_batch_near_the_best_rate():
    assert strategy.knee({1: 10.0, 2: 19.0, 4: 36.0, 8: 37.5, 16: 37.0}) == 4
    assert strategy.knee({4: 95.0, 8: 100.0}) == 4
    assert strategy.knee({4: 94.9, 8: 100.0}) == 8
    assert strategy.knee({8: 100.0, 4: 99.0, 2: 50.0}) == 4  # in any order
    assert strategy.knee({1: 5.0}) == 1
