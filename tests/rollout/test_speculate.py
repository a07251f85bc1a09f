"""Which drafts a bucket's rows verify when they share a budget."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import policy
from fastgrpo_jax.rollout import speculate, strategy, tree
from tests.rollout import toys

CHOICE = strategy.parse("learned:3:1:4@1.5")


def view(live, room=None):
    rows = len(live)
    zeros = jnp.zeros(rows, jnp.int32)
    room = jnp.asarray(room if room is not None else [9] * rows, jnp.int32)
    return speculate.View(jnp.asarray(live), zeros, zeros, None, room)


def share(tokens, chances, live, room=None, choice=CHOICE):
    """Returns each row's drafts with -1 where none is verified, and the line of tokens."""
    tokens = jnp.asarray(tokens, jnp.int32)
    draft = tree.chain(jnp.full(tokens.shape[0], 50, jnp.int32), tokens)
    scores = jnp.asarray(np.log(np.cumprod(np.asarray(chances, np.float32), axis=1)))
    kept, packing = speculate._share(choice, draft, scores, view(live, room))
    assert packing.row.shape == (choice.total(len(live)),)
    whole = np.asarray(draft.tokens)[np.asarray(packing.row), np.asarray(packing.node)]
    alive = np.asarray(live)[:, None]
    there = (np.asarray(kept.tokens) >= 0) & alive  # of these the place is told
    found = whole[np.asarray(packing.place)]
    np.testing.assert_array_equal(found[there], np.asarray(kept.tokens)[there])
    return np.asarray(kept.tokens)[:, 1:].tolist()


def test_the_likeliest_drafts_of_all_rows_are_verified():
    """Four rows have six tokens: their roots, and two drafts; then ten: six drafts."""
    tokens = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    chances = [[0.9, 0.9, 0.9], [0.5, 0.9, 0.9], [0.6, 0.2, 0.9], [0.95, 0.5, 0.5]]
    live = [True] * 4
    assert share(tokens, chances, live) == [[1, -1, -1], [-1] * 3, [-1] * 3, [10, -1, -1]]
    more = strategy.parse("learned:3:1:4@2.5")
    assert share(tokens, chances, live, choice=more) == [
        [1, 2, 3], [4, -1, -1], [7, -1, -1], [10, -1, -1],
    ]  # fmt: skip


def test_a_finished_row_leaves_its_tokens_to_the_others_and_no_draft_is_no_candidate():
    tokens = [[1, 2, 3], [4, 5, 6], [7, -1, -1], [-1, -1, -1]]
    chances = [[0.5] * 3, [0.99] * 3, [0.5] * 3, [0.99] * 3]
    found = share(tokens, chances, [True, False, True, True])
    assert found == [[1, 2, -1], [-1] * 3, [7, -1, -1], [-1] * 3]  # three live roots of six
    assert share(tokens, chances, [False, True, False, False])[1] == [4, 5, 6]


def test_of_equal_drafts_those_of_the_row_with_most_to_say_come_first():
    tokens, chances = [[1, 2, 3]] * 4, [[0.5, 0.5, 0.5]] * 4
    found = share(tokens, chances, [True] * 4, room=[3, 9, 4, 8])
    assert found == [[-1] * 3, [1, -1, -1], [-1] * 3, [1, -1, -1]]


@pytest.mark.parametrize("qk_norm", (False, True))
def test_a_packed_forward_is_the_whole_one_at_its_tokens(qk_norm):
    """Features of the line, and what the cache holds of it, equal those of all rows' tokens."""
    config = dataclasses.replace(toys.CONFIG, qk_norm=qk_norm)
    params = policy.init(jax.random.key(3), config)
    rng = np.random.default_rng(0)
    rows, nodes, slots = 3, 4, 12
    tokens = jnp.asarray(rng.integers(0, config.vocab, (rows, nodes)), jnp.int32)
    start = jnp.asarray([0, 5, 2], jnp.int32)
    positions = start[:, None] + jnp.arange(nodes, dtype=jnp.int32)
    mask = jnp.arange(slots) <= positions[..., None]
    cache = policy.new_cache(config, rows, slots)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), cache)

    def run(packing):
        return policy.Policy(config, taps=(0, 1)).apply(
            {"params": params}, tokens, positions, mask, cache, start, packing
        )

    whole = run(None)
    line = [(2, 0), (0, 0), (2, 1), (1, 0), (2, 2)]
    row, node = (jnp.asarray(x, jnp.int32) for x in zip(*line))
    place = (
        jnp.zeros((rows, nodes), jnp.int32)
        .at[row, node]
        .set(jnp.arange(len(line), dtype=jnp.int32))
    )
    packed = run(base.Packing(row, node, place))
    assert packed.features.shape == (1, len(line), config.hidden)
    np.testing.assert_allclose(packed.features[0], whole.features[row, node], rtol=1e-12)
    assert packed.tapped.shape == (1, len(line), 2 * config.hidden)
    np.testing.assert_allclose(packed.tapped[0], whole.tapped[row, node], rtol=1e-12)
    for a, b in zip(jax.tree.leaves(packed.cache), jax.tree.leaves(whole.cache)):
        at = start[row] + node
        np.testing.assert_allclose(a[row, :, at], b[row, :, at], rtol=1e-12)
