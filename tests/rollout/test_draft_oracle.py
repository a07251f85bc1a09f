import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.rollout import accept, draft_oracle

VOCAB, SPAN = 11, 24
propose_jit = jax.jit(draft_oracle.propose, static_argnums=(4, 5))


def answers(rows, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, SPAN)).astype(np.int32)


def propose(tokens, rows, length, depth, width, chance):
    params = draft_oracle.OracleParams(jnp.asarray(tokens), jnp.float32(chance))
    size = draft_oracle.nodes(depth, width)
    strategy = base.DraftStrategy("oracle", depth, width, size)
    rows, length = (jnp.asarray(x, jnp.int32) for x in (rows, length))
    root = jnp.asarray(tokens)[jnp.minimum(rows, len(tokens) - 1), length - 1]
    drafts = propose_jit(params, root, rows, length, strategy, VOCAB)
    assert drafts.tokens.shape == drafts.parent.shape == (len(rows), size)
    return drafts


@functools.partial(jax.jit, static_argnums=4)
def accepted(drafts, tokens, rows, length, depth):
    """Count the drafts that a target which says exactly `tokens` accepts."""

    def draw(node, d):
        token = tokens[rows, length + d]
        zero = jnp.zeros(token.shape, jnp.float32)
        return token, zero, zero

    return accept.walk(drafts, draw, depth).count - 1


@pytest.mark.parametrize("depth, width", [(1, 1), (3, 1), (3, 5)])
def test_an_oracle_that_tells_all_is_right_at_every_level(depth, width):
    """D7: the perfect drafter, with the truth in a sibling that is not always the same."""
    tokens, rows, length = answers(64), np.arange(64), np.arange(64) % 10 + 1
    drafts = propose(tokens, rows, length, depth, width, 1.0)
    np.testing.assert_array_equal(accepted(drafts, tokens, rows, length, depth), depth)
    t, p = np.asarray(drafts.tokens), np.asarray(drafts.parent)
    hidden = set()
    for b in range(64):
        above = 0
        for d in range(depth):
            level = np.arange(1 + d * width, 1 + (d + 1) * width)
            assert (p[b, level] == above).all()
            (slot,) = np.flatnonzero(t[b, level] == tokens[b, length[b] + d])  # in exactly one
            hidden.add(int(slot))
            above = level[slot]
    assert hidden == set(range(width))
    assert ((t >= 0) & (t < VOCAB)).all()


@pytest.mark.parametrize("width", [1, 3])
def test_an_oracle_that_tells_nothing_is_never_right(width):
    """D7: the drafter of 0 acceptance; the truth is in no node of its level."""
    tokens, rows, length = answers(64), np.arange(64), np.full(64, 3)
    drafts = propose(tokens, rows, length, 4, width, 0.0)
    levels = np.asarray(drafts.tokens)[:, 1:].reshape(64, 4, width)
    assert (levels != tokens[:, 3:7, None]).all()


def test_an_oracle_tells_as_often_as_it_is_asked_to_whatever_came_before():
    tokens, rows, length = answers(4000), np.arange(4000), np.full(4000, 5)
    drafts = propose(tokens, rows, length, 3, 2, 0.8)
    levels = np.asarray(drafts.tokens)[:, 1:].reshape(4000, 3, 2)
    told = (levels == tokens[:, 5:8, None]).any(-1)
    assert (np.abs(told.mean(axis=0) - 0.8) < 0.025).all()
    assert abs(told.all(axis=1).mean() - 0.8**3) < 0.03
    count = accepted(drafts, tokens, rows, length, 3)
    np.testing.assert_array_equal(count, np.cumprod(told, axis=1).sum(axis=1))


def test_an_oracle_tells_at_one_place_of_a_row_and_not_at_another():
    tokens, length = answers(1), np.arange(1, SPAN)
    drafts = propose(tokens, np.zeros(SPAN - 1), length, 1, 1, 0.5)
    told = np.asarray(drafts.tokens)[:, 1] == tokens[0, length]
    assert 6 <= told.sum() <= 17


def test_an_oracle_makes_nothing_up_beyond_what_it_knows():
    """D4: levels past the answer's last column or its -1 hold wrong tokens, and no index wraps."""
    tokens = answers(2)
    tokens[0, 10:] = -1
    drafts = propose(tokens, [0, 1, 2], [9, SPAN - 1, SPAN - 1], 3, 2, 1.0)
    levels = np.asarray(drafts.tokens)[:, 1:].reshape(3, 3, 2)
    assert (levels[0, 0] == tokens[0, 9]).any() and (levels[1, 0] == tokens[1, -1]).any()
    assert (levels[:2, 1:] != np.array([0, tokens[1, -1]])[:, None, None])[1].all()
    assert ((levels >= 0) & (levels < VOCAB)).all()


def test_what_an_oracle_drafts_depends_on_the_row_and_place_not_on_the_batch():
    tokens = answers(8)
    whole = propose(tokens, np.arange(8), np.arange(8) + 2, 3, 2, 0.7)
    some = propose(tokens, [5, 1], [7, 3], 3, 2, 0.7)
    np.testing.assert_array_equal(some.tokens, np.asarray(whole.tokens)[[5, 1]])
    np.testing.assert_array_equal(some.parent, np.asarray(whole.parent)[[5, 1]])


def test_an_oracles_tree_counts_its_nodes():
    assert [draft_oracle.nodes(d, w) for d, w in ((1, 1), (3, 1), (2, 4), (5, 8))] == [2, 4, 9, 41]
