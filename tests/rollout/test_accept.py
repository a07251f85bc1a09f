import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.rollout import accept, tree


def ints(x):
    return jnp.asarray(x, jnp.int32)


def table_draw(table):
    """Draw from a table [B, M, D + 1] of the token that each node would get at each depth, as
    the noise of a depth is another's; log-probs name node and depth."""
    rows = jnp.arange(len(table))

    def draw(node, depth):
        return (
            table[rows, node, depth],
            (node * 100 + depth).astype(jnp.float32),
            -(node * 100 + depth).astype(jnp.float32),
        )

    return draw


@functools.partial(jax.jit, static_argnums=2)
def walk(drafts, table, depth):
    return accept.walk(drafts, table_draw(table), depth)


def walk_longhand(tokens, parent, table, node=0, depth=0):
    """List (token, node, depth) as long as the drawn token is a child of the node."""
    token = table[node][depth]
    below = [i for i in range(len(tokens)) if parent[i] == node and tokens[i] == token]
    here = [(token, node, depth)]
    return here + (walk_longhand(tokens, parent, table, below[0], depth + 1) if below else [])


def depth_of(parent, node):
    return 0 if parent[node] < 0 else 1 + depth_of(parent, parent[node])


@pytest.mark.parametrize("nodes", [1, 2, 5, 9])
def test_a_walk_follows_the_targets_draws_through_random_trees(nodes):
    """D7, D13: twins, dead nodes (-1), every number of accepted drafts, rows of their own."""
    rng = np.random.default_rng(nodes)
    rows = 60
    parent = [
        [-1, *(int(max(0, i - rng.integers(1, 4))) for i in range(1, nodes))] for _ in range(rows)
    ]
    tokens = rng.choice([-1, 0, 1, 2], (rows, nodes), p=[0.1, 0.3, 0.3, 0.3])
    depth = max(depth_of(p, i) for p in parent for i in range(nodes))
    table = rng.integers(0, 3, (rows, nodes, depth + 1))
    for b in range(0, rows, 2):  # let half of the draws hit: each node says its last child
        for i in range(1, nodes):
            if tokens[b, i] >= 0:
                table[b, parent[b][i], depth_of(parent[b], i) - 1] = tokens[b, i]
    drafts = base.DraftTree(ints(tokens), ints(parent))
    verdict = walk(drafts, ints(table), depth)
    assert verdict.tokens.shape == (rows, depth + 1)
    assert verdict.count.dtype == jnp.int32
    counts = []
    for b in range(rows):
        expected = walk_longhand(tokens[b], parent[b], table[b])
        n = int(verdict.count[b])
        assert n == len(expected)
        ours = zip(verdict.tokens[b], verdict.nodes[b], verdict.logps[b], verdict.masses[b])
        for (token, node, d), (t, i, logp, mass) in zip(expected, list(ours)[:n]):
            assert (int(t), int(i)) == (token, node)
            assert float(logp) == node * 100 + d == -float(mass)
        counts.append(n)
    assert nodes == 1 or {1, 2} <= set(counts)


@pytest.mark.parametrize("right", range(5))
def test_a_chain_emits_one_more_than_it_got_right(right):
    """D6: 0 to all of 4 drafts right; a later right token does not count after a wrong one."""
    truth = [3, 1, 4, 1, 5]
    draft = [truth[i] if i != right else 9 for i in range(4)]
    drafts = tree.chain(ints([0]), ints([draft]))
    verdict = walk(drafts, ints([[truth] * 5]), 4)
    assert int(verdict.count[0]) == right + 1
    np.testing.assert_array_equal(verdict.tokens[0, : right + 1], truth[: right + 1])
    np.testing.assert_array_equal(verdict.nodes[0, : right + 1], np.arange(right + 1))


def test_a_walk_goes_no_deeper_than_it_is_told():
    drafts = tree.chain(ints([0]), ints([[1, 1, 1]]))
    verdict = walk(drafts, jnp.ones((1, 4, 2), jnp.int32), 1)
    assert verdict.tokens.shape == (1, 2)
    np.testing.assert_array_equal(verdict.count, [2])


def test_plain_decoding_is_a_walk_at_a_root():
    drafts = tree.chain(ints([5, 6]), jnp.zeros((2, 0), jnp.int32))
    verdict = walk(drafts, ints([[[7]], [[6]]]), 0)
    np.testing.assert_array_equal(verdict.tokens, [[7], [6]])
    np.testing.assert_array_equal(verdict.nodes, [[0], [0]])
    np.testing.assert_array_equal(verdict.count, [1, 1])


def cut(tokens, counts, stop_tokens, room):
    tokens = ints(tokens)
    zeros = jnp.zeros(tokens.shape, jnp.float32)
    verdict = base.Verdict(tokens, jnp.zeros_like(tokens), zeros, zeros, ints(counts))
    out, stopped = accept.cut(verdict, ints(stop_tokens), ints(room))
    np.testing.assert_array_equal(out.tokens, tokens)
    assert out.count.dtype == jnp.int32
    return np.asarray(out.count), np.asarray(stopped)


def test_a_round_ends_at_its_first_stop_token_or_at_the_rows_room():
    """D1, D4, D6: one or two stops at every offset, every count and every room, at depth 4."""
    wide = 5
    cases = list(
        itertools.product(range(wide + 1), range(wide + 1), range(1, wide + 1), range(wide + 3))
    )
    tokens = np.tile([10, 11, 12, 13, 14], (len(cases), 1))
    for row, (a, b, _, _) in zip(tokens, cases):
        row[a:][:1] = 2  # offset 5: nowhere
        row[b:][:1] = 3
    counts, stopped = cut(tokens, [c[2] for c in cases], [2, 3], [c[3] for c in cases])
    for row, (_, _, count, room), n, stop in zip(tokens, cases, counts, stopped):
        emitted = []
        for token in row[:count]:
            if len(emitted) == room:
                break
            emitted.append(token)
            if token in (2, 3):
                break
        assert n == len(emitted), (row, count, room)
        assert stop == (bool(emitted) and emitted[-1] in (2, 3)), (row, count, room)


def test_the_edges_of_a_cut():
    """D1: a stop as the very last of the room counts; one just beyond it does not."""
    row = [7, 8, 2, 9]
    counts, stopped = cut([row] * 6, [4, 4, 4, 2, 3, 4], [2], [4, 3, 2, 4, 4, 0])
    np.testing.assert_array_equal(counts, [3, 3, 2, 2, 3, 0])
    np.testing.assert_array_equal(stopped, [True, True, False, False, True, False])


def test_without_stop_tokens_only_room_ends_a_round():
    counts, stopped = cut([[1, 2, 3]] * 3, [3, 3, 1], np.zeros(0), [5, 2, 2])
    np.testing.assert_array_equal(counts, [3, 2, 1])
    assert not stopped.any()
