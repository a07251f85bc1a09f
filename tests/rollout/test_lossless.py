"""Law 1: a rollout's tokens are plain decoding's, whoever drafts them, and the model's own.

All of it in float64, where the law knows no exception.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fastgrpo_jax import base
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.rollout import draft_oracle, generate, inputs, record, speculate, strategy
from fastgrpo_jax.rollout import engine as engine_lib
from tests.rollout import toys

SETTINGS = {
    "T 1": toys.SAMPLED,
    "T 0.7, top-k and top-p": inputs.Settings(0.7, top_k=5, top_p=0.8),
    "greedy": inputs.Settings(0.0),
}
CHAIN, TREE = "oracle:3:1:4", "oracle:3:3:10"
DRAFTS = [(text, accept) for text in (CHAIN, TREE) for accept in (0.0, 0.6, 1.0)]
DRAFTS += [("learned:3:1:4", None), ("learned:3:3:8", None), ("ngram:3:1:4", None)]
SHARED = "oracle:3:1:4@1.6"
DRAFTS += [(SHARED, accept) for accept in (0.0, 0.6, 1.0)] + [("learned:3:1:4@1.6", None)]


def rollout(weights, settings, controller, spec=toys.SPEC, **layout) -> record.Rollout:
    return toys.rollout(toys.engine(spec, **layout), weights, controller, settings)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_plain_decoding_equals_a_longhand_loop_without_cache(settings):
    """The log-prob is that of the emitted token, the stop token's included (A1, A6, C8, C11)."""
    found = toys.plain(settings).batch
    wanted = toys.longhand(
        toys.CONFIG,
        toys.policy_params(),
        toys.REQUEST,
        settings,
        toys.LIMITS,
        toys.STOP,
        toys.GROUP,
    )
    toys.assert_same(found, wanted)
    assert wanted.stopped.any() and not wanted.stopped.all()
    said = np.arange(toys.LIMITS.total) >= wanted.prompt_length[:, None]
    said &= np.arange(toys.LIMITS.total) < wanted.length[:, None]
    assert np.all(found.logps[~said] == 0) and np.all(found.masses[~said] == 0)
    assert np.all(found.logps[said] < 0)
    if settings.top_k:
        assert found.masses.min() < -0.1
        assert np.all(found.logps <= found.masses + 1e-6)


@pytest.mark.parametrize(("text", "accept"), DRAFTS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_no_draft_changes_a_token(settings, text, accept):
    """Random, mixed and perfect acceptance give plain decoding's tokens (D7, D8, D11)."""
    plain = toys.plain(settings)
    run = rollout(toys.told(plain, accept or 0.0), settings, toys.fixed(text))
    toys.assert_same(run.batch, plain.batch)
    share = toys.accepted_share(run)
    if text.startswith("oracle"):
        few = 0.2 if "@" in text else 0.0  # of the drafts, hardly more than one a row is tried
        assert {0.0: share < 0.1, 0.6: 0.3 - few <= share < 0.7, 1.0: share >= 0.6 - few}[accept]
    elif text.startswith("learned"):
        assert share > 0.1
    elif settings.temperature == 0:
        assert share > 0.1


@pytest.mark.parametrize("rounds", (1, 3, 50))
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_switching_at_every_block_changes_no_token(settings, rounds):
    """Each strategy finds the caches as the one before left them (D7)."""
    plain = toys.plain(settings)
    texts = ("off", "learned:3:3:8", TREE, "ngram:3:1:4", "learned:3:1:4", SHARED, CHAIN)
    texts += ("learned:3:1:4@1.6", "ngram:3:1:4@2")
    controller = strategy.cycle(tuple(map(strategy.parse, texts)))
    run = rollout(toys.told(plain, 0.6), settings, controller, rounds=rounds)
    toys.assert_same(run.batch, plain.batch)
    if rounds == 1:
        assert {str(b.strategy) for b in run.blocks} == set(texts)


@pytest.mark.parametrize("text", ("learned:3:1:4", "learned:3:3:8", "learned:3:1:4@1.6"))
def test_a_drafter_of_nan_changes_no_token(text):
    plain = toys.plain()
    run = rollout(toys.poisoned(toys.weights()), toys.SAMPLED, toys.fixed(text))
    toys.assert_same(run.batch, plain.batch)


def test_the_eagle_head_and_the_deterministic_tree_change_no_token():
    spec = toys.DETERMINISTIC
    for settings in SETTINGS.values():
        run = rollout(toys.weights(spec), settings, toys.fixed("learned:3:3:8"), spec)
        toys.assert_same(run.batch, toys.plain(settings).batch)
        assert toys.accepted_share(run) > 0.02


def test_plain_decoding_needs_no_drafter_and_no_single_prefill():
    """Two prompts in one prefill, the last filled up, and another chunk: the same tokens."""
    spec = speculate.Spec(
        policy=toys.CONFIG, eagle=None, group=toys.GROUP, prefill_rows=2, prefill_chunk=4
    )
    for settings in SETTINGS.values():
        run = rollout(toys.weights(spec), settings, toys.fixed("off"), spec)
        toys.assert_same(run.batch, toys.plain(settings).batch)


def test_settings_are_per_row():
    """Rows of one batch may differ in temperature and filters (D11)."""
    kinds = tuple(SETTINGS.values())
    driver = toys.Driver(toys.told(toys.plain()))
    pick = np.arange(toys.ROWS) % len(kinds)
    driver.sample = driver.sample._replace(
        temperature=jnp.asarray([kinds[i].temperature for i in pick], jnp.float32),
        top_k=jnp.asarray([kinds[i].top_k for i in pick], jnp.int32),
        top_p=jnp.asarray([kinds[i].top_p for i in pick], jnp.float32),
    )
    assert driver.block(TREE, 50).done.all()
    found = generate._finish(driver.state.sequences)
    for row, i in enumerate(pick):
        wanted = toys.plain(kinds[i]).batch
        np.testing.assert_array_equal(found.tokens[row], wanted.tokens[row])
        np.testing.assert_allclose(found.masses[row], wanted.masses[row], atol=2e-6)


def answers(request: inputs.Request, settings=toys.SAMPLED) -> dict[int, np.ndarray]:
    """Map each prompt's place to its group's tokens."""
    batch = toys.plain(settings, toys.NEVER, request=request).batch
    groups = batch.tokens.reshape(len(request.places), toys.GROUP, -1)
    return dict(zip(request.places, groups))


def test_a_prompt_is_answered_alike_in_any_order_and_company():
    """The batch's order and the other prompts change nothing (A1, D24)."""
    request = toys.REQUEST
    known = answers(request)
    order = (2, 0, 1)
    turned = answers(
        request._replace(
            prompts=tuple(request.prompts[i] for i in order),
            places=tuple(request.places[i] for i in order),
        )
    )
    for place in request.places:
        np.testing.assert_array_equal(turned[place], known[place])
    company = answers(request._replace(prompts=((1, 2, 3, 4), request.prompts[1], (9,) * 12)))
    np.testing.assert_array_equal(company[request.places[1]], known[request.places[1]])


@pytest.mark.parametrize(
    "change",
    (dict(seed=6), dict(step=3), dict(places=(3 + 2**32, 2**33 + 1, 12)), dict(seed=5 + 2**40)),
    ids=str,
)
def test_another_address_samples_other_tokens(change):
    """Equal seeds reproduce; another seed, step or place does not (D24)."""
    known = list(answers(toys.REQUEST).values())
    again = toys.plain.__wrapped__(stop=toys.NEVER).batch.tokens.reshape(np.shape(known))
    np.testing.assert_array_equal(again, known)
    other = list(answers(toys.REQUEST._replace(**change)).values())
    for a, b in zip(known, other):
        assert all(not np.array_equal(x, y) for x, y in zip(a, b))
    same = list(answers(toys.REQUEST._replace(**change), inputs.Settings(0.0)).values())
    np.testing.assert_array_equal(same, list(answers(toys.REQUEST, inputs.Settings(0.0)).values()))


def test_members_of_a_group_differ_from_their_first_token_on():
    """No two members share their noise, at any index (D24)."""
    batch = toys.plain(stop=toys.NEVER).batch
    firsts = set()
    for rows in np.arange(toys.ROWS).reshape(-1, toys.GROUP):
        start = batch.prompt_length[rows[0]]
        firsts.add(len({batch.tokens[i, start] for i in rows}))
        for a, b in itertools.combinations(rows, 2):
            same = batch.tokens[a, start:] == batch.tokens[b, start:]
            assert same.mean() < 0.5
    assert max(firsts) == toys.GROUP


# Chi-square of the emitted tokens against the model's own distribution, a vocabulary of 6.

TINY = base.PolicyConfig(
    vocab=6,
    hidden=8,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=8,
    ffn=8,
    max_positions=16,
    dtype="float64",
)
MANY = 2048
PROMPT = (2, 0, 5)
DRAWN = 5  # tokens of one full round of the chain below


def exact(params, settings) -> np.ndarray:
    """Enumerate P(x_1 .. x_5 | prompt) over all 6^5 responses, filters included."""
    said = np.array(list(itertools.product(range(TINY.vocab), repeat=DRAWN)), np.int32)
    rows = np.concatenate([np.tile(PROMPT, (len(said), 1)), said], axis=1)
    logits = toys.read(TINY, params, jnp.asarray(rows, jnp.int32))[0]
    scaled = np.asarray(logits)[:, len(PROMPT) - 1 : -1] / settings.temperature
    p = np.exp(toys.log_softmax(scaled))
    keep = np.array([[toys.filtered(x, settings.top_k, settings.top_p) for x in r] for r in scaled])
    p = np.where(keep, p, 0) / np.where(keep, p, 0).sum(-1, keepdims=True)
    each = np.take_along_axis(p, said[..., None], axis=2)[..., 0]
    return each.prod(axis=1).reshape((TINY.vocab,) * DRAWN)


def p_value(counts: np.ndarray, chance: np.ndarray) -> float:
    """Test counts against chances by chi-square; cells of fewer than 5 expected are joined."""
    assert counts[chance == 0].sum() == 0
    wanted = chance * counts.sum()
    rare = wanted < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(stats.chi2.sf(statistic, len(wanted) - 1))


@pytest.fixture(scope="module")
def tiny():
    """Give run(text, settings) -> tokens [4 * 2048, 5], the same prompt answered many times."""
    params = toys.sharpen(policy.init(jax.random.key(3), TINY), 25)
    head = eagle.config_for(TINY, "fastgrpo")
    spec = speculate.Spec(policy=TINY, eagle=head, group=MANY, prefill_chunk=4)
    limits = engine_lib.Limits(len(PROMPT), DRAWN, len(PROMPT) + DRAWN)
    engine = engine_lib.make_engine(
        spec, rows=(MANY,), limits=limits, stop_tokens=(toys.NEVER,), slot_step=16, span=5
    )
    weights = speculate.Weights(params, toys.drafter_params(head), None, jnp.float32(1))

    def one(text, settings, step, truth):
        oracle = draft_oracle.OracleParams(jnp.asarray(truth), jnp.float32(1))
        request = inputs.Request((PROMPT,), (0,), 0, step)
        w, controller = weights._replace(oracle=oracle), toys.fixed(text)
        run = generate.rollout(engine, w, request, settings, limits, controller)
        if text.startswith("oracle"):
            assert sum(int(b.report.rounds) for b in run.blocks) == 1
        return run.batch.tokens

    def run(text, settings):
        said = []
        for step in range(4):
            truth = np.full((MANY, limits.total), -1, np.int32)
            if text.startswith("oracle"):
                truth = one("off", settings, step, truth)
            said.append(one(text, settings, step, truth)[:, len(PROMPT) :])
        return np.concatenate(said)

    return params, run


@pytest.mark.parametrize("settings", (toys.SAMPLED, inputs.Settings(0.7, 4, 0.9)), ids=str)
@pytest.mark.parametrize("text", ("oracle:4:1:5", "learned:2:2:5", "learned:3:1:4@1.5"))
def test_emitted_tokens_follow_the_models_distribution(tiny, text, settings):
    """At the first, the middle and the last (bonus) place of a round, also given the token
    before, and of whole responses, over 8192 rollouts (D8, D11)."""
    params, run = tiny
    chance = exact(params, settings)
    said = run(text, settings)
    for place in range(DRAWN):
        pair = (place - 1, place) if place else (place,)
        others = tuple(i for i in range(DRAWN) if i not in pair)
        cells = (TINY.vocab,) * len(pair)
        flat = np.ravel_multi_index(said[:, list(pair)].T, cells)
        counts = np.bincount(flat, minlength=np.prod(cells)).reshape(cells)
        assert p_value(counts.ravel(), chance.sum(others).ravel()) > 1e-3, place
    flat = np.ravel_multi_index(said.T, chance.shape)
    assert p_value(np.bincount(flat, minlength=chance.size), chance.ravel()) > 1e-3
