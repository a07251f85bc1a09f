"""Laws of the caches: after any rounds they are those of the accepted tokens read afresh.

And of the learned drafter's trees: they are those of a longhand search without cache.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.rollout import draft_eagle, inputs, sampling, speculate, strategy
from tests.rollout import toys

LEARNED_CHAIN, LEARNED_TREE = "learned:3:1:4", "learned:3:3:8"
CHAIN, TREE, NGRAM = "oracle:3:1:4", "oracle:3:3:10", "ngram:3:1:4"


class Fresh(NamedTuple):
    """What a whole-row forward of policy and drafter gives."""

    features: np.ndarray
    cache: base.KVCache
    next_feature: np.ndarray
    hidden: np.ndarray
    draft_cache: base.KVCache


def reread(driver: toys.Driver) -> Fresh:
    """Read every row's tokens from the start, in one chunk."""
    spec, w = driver.engine.spec, driver.weights
    tokens = jnp.maximum(driver.state.sequences.tokens, 0)
    _, features, cache = toys.read(spec.policy, w.policy, tokens, spec.taps)
    embeds = w.policy["embed"][tokens[:, 1:]]
    draft = toys.read_drafter(spec.eagle, w.eagle, features[:, :-1], embeds)
    return jax.device_get(Fresh(features, cache, *draft))


def check(driver: toys.Driver, fed: np.ndarray | None = None) -> np.ndarray:
    """Compare live rows' caches with fresh ones; `fed` is where the drafter stands, None: ready.

    Returns the live rows' lengths minus 1 (0 where a row is done).
    """
    fresh, state = reread(driver), jax.device_get(driver.state)
    s, memory = state.sequences, state.draft
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-9)
    live = np.flatnonzero(~s.done)
    ready = np.where(s.done, 0, s.length - 1)
    fed = ready if fed is None else fed
    np.testing.assert_array_equal(memory.fed[live], fed[live])
    for row in live:
        n = ready[row]
        for found, wanted in zip(jax.tree.leaves(state.cache), jax.tree.leaves(fresh.cache)):
            same(found[row, :, :n], wanted[row, :, :n])
        same(memory.features[row, :n], fresh.features[row, :n])
        m = fed[row]
        leaves = zip(jax.tree.leaves(memory.cache), jax.tree.leaves(fresh.draft_cache))
        for found, wanted in leaves:
            same(found[row, :, :m], wanted[row, :, :m])
        if m:
            same(memory.feature[row], fresh.next_feature[row, m - 1])
            same(memory.hidden[row], fresh.hidden[row, m - 1])
        else:
            assert not memory.feature[row].any() and not memory.hidden[row].any()
    return ready


def told(accept: float) -> speculate.Weights:
    return toys.told(toys.plain(stop=toys.NEVER), accept)


@pytest.mark.parametrize("sizes", ((1, 2, 7), (8, 9, 3), (10, 11, 12)), ids=str)
def test_a_prefill_leaves_true_caches_for_prompts_of_any_length(sizes):
    """Of 1 token (nothing to read) up to the limit, a chunk being 8 tokens (A1)."""
    rng = np.random.default_rng(4)
    prompts = tuple(tuple(rng.integers(0, toys.VOCAB, n).tolist()) for n in sizes)
    driver = toys.Driver(told(1.0), stop=toys.NEVER, request=toys.REQUEST._replace(prompts=prompts))
    ready = check(driver)
    assert ready.tolist() == [n - 1 for n in sizes for _ in range(toys.GROUP)]


@pytest.mark.parametrize("text", (LEARNED_CHAIN, LEARNED_TREE))
def test_the_learned_drafter_keeps_only_true_features_and_emitted_tokens(text):
    """After each round, the all-accepted and the none-accepted included (D7, D16, D17).

    A hot sampler follows the noise more than the model, so even a random drafter is often right.
    """
    driver = toys.Driver(told(1.0), inputs.Settings(4.0), stop=toys.NEVER)
    counts, length = set(), check(driver)
    for rounds in (1, 1, 1, 2, 1):
        driver.block(text, rounds)
        new = check(driver)
        if rounds == 1:
            counts |= set((new - length)[new > 0].tolist())
        length = new
    assert counts == {1, 2, 3, 4}


@pytest.mark.parametrize(
    "spec", (toys.DETERMINISTIC, toys.THREE_DEPTHS), ids=("eagle", "three depths")
)
def test_other_heads_keep_only_true_features_and_emitted_tokens(spec):
    driver = toys.Driver(toys.weights(spec), spec=spec, stop=toys.NEVER)
    fed = check(driver)
    driver.block("off", 2)
    check(driver, fed)
    driver.activate()
    check(driver)
    for rounds in (1, 2):
        driver.block(LEARNED_TREE, rounds)
        check(driver)


@pytest.mark.parametrize("accept", (0.0, 0.6, 1.0))
@pytest.mark.parametrize("other", ("off", NGRAM, CHAIN, TREE))
def test_features_are_kept_while_the_drafter_is_off(other, accept):
    """Then activation feeds them all, whatever was accepted meanwhile (D7, D16, D17)."""
    driver = toys.Driver(told(accept), stop=toys.NEVER)
    fed = check(driver)
    for rounds in (1, 2):
        driver.block(other, rounds)
        check(driver, fed)
    driver.activate()
    fed = check(driver)
    driver.activate()  # nothing is left to feed
    fed = check(driver)
    driver.block(LEARNED_TREE, 1)
    check(driver)
    assert fed.any()


def test_activation_catches_up_over_several_chunks():
    """A gap of more than two chunks, and rows that finished in between stay out of it."""
    driver = toys.Driver(told(1.0), stop=toys.STOP)
    driver.block("off", 19)
    driver.activate()
    ready = check(driver)
    assert ready.max() > 2 * toys.SPEC.prefill_chunk and not ready.all()


def test_rows_that_are_done_write_nothing():
    """Their line, their limit's exactness and their neighbours stay as they were (D1, D4)."""
    driver = toys.Driver(told(1.0), stop=toys.STOP)
    driver.block(TREE, 5)
    before = jax.device_get(driver.state.sequences)
    done = np.flatnonzero(before.done)
    driver.block(LEARNED_CHAIN, 0)
    driver.block(LEARNED_TREE, 1)
    after = jax.device_get(driver.state.sequences)
    assert len(done) and not before.done.all()
    for old, new in zip(before, after):
        np.testing.assert_array_equal(old[done], new[done])


# The drafted tree, longhand.


class Node(NamedTuple):
    """A node of the longhand search: its path below the root and what the drafter said there."""

    path: tuple[int, ...]
    features: tuple[np.ndarray, ...]  # fed in with the path's tokens
    next_feature: np.ndarray
    hidden: np.ndarray
    score: float


def extend(driver, features, tokens, nodes):
    """Run the drafter over the row's true pairs and each node's own guesses, without cache."""
    size, width = toys.LIMITS.total - 1, 3
    feats = np.zeros((width, size, toys.CONFIG.hidden))
    embeds = np.zeros_like(feats)
    table = np.asarray(driver.weights.policy["embed"])
    for i, (path, guesses) in enumerate(nodes):
        pairs = np.concatenate([features, *[g[None] for g in guesses]])
        feats[i, : len(pairs)] = pairs
        embeds[i, : len(pairs)] = table[[*tokens[1:], *path]]
    spec = driver.engine.spec
    feature, hidden, _ = toys.read_drafter(spec.eagle, driver.weights.eagle, feats, embeds)
    last = [len(features) + len(path) - 1 for path, _ in nodes]
    return [(np.asarray(feature[i, n]), np.asarray(hidden[i, n])) for i, n in enumerate(last)]


def search(driver, row, noise, temperature, tau, choice, shared) -> list[tuple[int, ...]]:
    """Search the best `nodes - 1` paths by hand; each is the tokens below the root, in order."""
    s = jax.device_get(driver.state.sequences)
    tokens = s.tokens[row, : s.length[row]]
    features = reread(driver).features[row, : len(tokens) - 1]
    head = np.asarray(driver.weights.policy["head"])
    ((feature, hidden),) = extend(driver, features, tokens, [((), ())])
    level = [Node((), (), feature, hidden, 0.0)]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for d in range(choice.depth):
        found = []
        for node in level:
            logits = node.hidden @ head.T
            if shared:
                gain = noise[row, d] if temperature else 0
                logits = (logits / (temperature or 1) + gain) / tau
            chance = toys.log_softmax(logits)
            for token in np.argsort(-chance)[: choice.width]:
                found.append((node.score + chance[token], (*node.path, int(token)), node))
        pool += [(score, path) for score, path, _ in found]
        best = sorted(found, key=lambda x: -x[0])[: choice.width]
        nodes = [(path, (*up.features, up.next_feature)) for _, path, up in best]
        said = extend(driver, features, tokens, nodes)
        level = [
            Node(path, guesses, *out, score)
            for (score, _, _), (path, guesses), out in zip(best, nodes, said)
        ]
    if choice.chain:
        return [path for _, path in pool]
    kept = sorted(pool, key=lambda x: -x[0])[: choice.nodes - 1]
    return [path for _, path in pool if path in {p for _, p in kept}]


def paths(tree: base.DraftTree, row: int) -> list[tuple[int, ...]]:
    """Spell a tree's nodes out, the root first, as the tokens on the way to each."""
    out: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[row, 1:].tolist(), tree.parent[row, 1:].tolist()):
        assert 0 <= parent < len(out)
        out.append((*out[parent], token))
    return out


propose = jax.jit(draft_eagle.propose, static_argnums=(0, 7, 8))


def drafted(driver, settings, tau, choice, shared=True):
    """Draft from a driver's state: (tree, noise at the places ahead, roots)."""
    s = driver.state.sequences
    ahead = s.length[:, None] + jnp.arange(choice.depth + 1, dtype=jnp.int32)
    keys = jnp.broadcast_to(driver.sample.key[:, None], (*ahead.shape, 2))
    noise = sampling.gumbel(keys, ahead, jnp.arange(toys.VOCAB, dtype=jnp.int32))
    root = jnp.take_along_axis(s.tokens, s.length[:, None] - 1, axis=1)[:, 0]
    tree, *_ = propose(
        driver.engine.spec.eagle,
        speculate.learned(driver.weights),
        driver.state.draft,
        root,
        noise,
        jnp.full(toys.ROWS, settings.temperature, jnp.float32),
        jnp.float32(tau),
        choice,
        shared,
    )
    return jax.device_get((tree, noise, root))


@pytest.mark.parametrize(
    ("text", "settings", "tau", "shared"),
    (
        (LEARNED_CHAIN, toys.SAMPLED, 1.0, True),
        ("learned:4:3:25", toys.SAMPLED, 1.0, True),
        (LEARNED_TREE, inputs.Settings(0.7), 0.6, True),
        (LEARNED_TREE, inputs.Settings(0.0), 1.0, True),
        (LEARNED_TREE, toys.SAMPLED, 1.0, False),
    ),
)
def test_the_drafted_tree_is_that_of_a_longhand_search(text, settings, tau, shared):
    """Best `width` of each level are expanded with their own features and ancestors only; of all
    the best `nodes - 1` are kept; noise, temperature and tau count under shared noise alone."""
    w = told(1.0)
    w = w._replace(eagle=toys.sharpen(w.eagle, 4))  # else what a node attends to hardly matters
    driver = toys.Driver(w, settings, stop=toys.NEVER)
    driver.block(LEARNED_TREE, 1)
    choice = strategy.parse(text)
    tree, noise, root = drafted(driver, settings, tau, choice, shared)
    np.testing.assert_array_equal(tree.tokens[:, 0], root)
    assert np.all(tree.parent[:, 0] == -1) and tree.tokens.shape == (toys.ROWS, choice.nodes)
    for row in range(toys.ROWS):
        wanted = search(driver, row, noise, settings.temperature, tau, choice, shared)
        assert paths(tree, row)[1:] == wanted


def test_a_drafter_of_nan_still_drafts_a_tree():
    driver = toys.Driver(toys.poisoned(told(1.0)), stop=toys.NEVER)
    tree, _, _ = drafted(driver, toys.SAMPLED, 1.0, strategy.parse(LEARNED_TREE))
    assert np.all((tree.tokens >= 0) & (tree.tokens < toys.VOCAB))
    for row in range(toys.ROWS):
        nodes = paths(tree, row)
        assert len(set(nodes)) == len(nodes) and max(map(len, nodes)) <= 3
