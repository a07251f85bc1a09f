import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.rollout import tree

#        0
#      / | \
#     1  2  5
#    /|     |
#   3 4     6
#     |
#     7
PARENT = [-1, 0, 0, 1, 1, 0, 5, 4]


def ints(x):
    return jnp.asarray(x, jnp.int32)


def path_longhand(parent, node):
    """List the nodes from one up to the root, itself included."""
    path = []
    while node >= 0:
        path.append(node)
        node = parent[node]
    return path


def random_trees(rng, rows, nodes):
    parent = [[-1, *(int(rng.integers(0, i)) for i in range(1, nodes))] for _ in range(rows)]
    return parent, max(len(path_longhand(p, i)) - 1 for p in parent for i in range(nodes))


def test_ancestors_of_a_hand_drawn_tree():
    seen = tree.ancestors(ints([PARENT]), 3)
    expected = [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 1, 0, 0, 1],
    ]
    np.testing.assert_array_equal(seen[0], np.array(expected, bool))
    np.testing.assert_array_equal(tree.depths(seen)[0], [0, 1, 1, 2, 2, 1, 2, 3])


@pytest.mark.parametrize("seed", range(6))
def test_ancestors_and_depths_of_random_trees_are_those_of_climbing(seed):
    """The depth given is exactly that of the deepest row; rows have trees of their own."""
    rng = np.random.default_rng(seed)
    rows, nodes = 5, 2 + 2 * seed
    parent, depth = random_trees(rng, rows, nodes)
    seen = np.asarray(ancestors(ints(parent), depth))
    depths = tree.depths(jnp.asarray(seen))
    assert depths.dtype == jnp.int32
    for b in range(rows):
        for i in range(nodes):
            path = path_longhand(parent[b], i)
            assert sorted(np.flatnonzero(seen[b, i])) == sorted(path)
            assert depths[b, i] == len(path) - 1


def test_a_root_alone_sees_itself():
    seen = tree.ancestors(ints([[-1]] * 3), 0)
    assert seen.shape == (3, 1, 1) and bool(seen.all())
    np.testing.assert_array_equal(tree.depths(seen), np.zeros((3, 1)))


def test_child_finds_the_first_child_with_the_token_and_no_other_node():
    tokens = [9, 5, 6, 5, 7, 6, 5, -1]
    cases = [  # node, token, found
        (0, 5, 1),
        (0, 6, 2),  # twins: the first
        (0, 7, None),  # a grandchild
        (0, 9, None),  # the root itself is nobody's child
        (1, 5, 3),
        (1, 7, 4),
        (1, 6, None),  # the child of another
        (5, 5, 6),
        (2, 5, None),  # a leaf
        (4, 5, None),  # its child holds -1
    ]
    rows = len(cases)
    drawn = base.DraftTree(ints([tokens] * rows), ints([PARENT] * rows))
    found, which = tree.child(drawn, ints([c[0] for c in cases]), ints([c[1] for c in cases]))
    np.testing.assert_array_equal(found, [c[2] is not None for c in cases])
    for case, index in zip(cases, which):
        assert case[2] is None or int(index) == case[2]
    assert which.dtype == jnp.int32


def test_a_chain_has_one_child_per_node():
    drawn = tree.chain(ints([7, 8]), ints([[1, 2, 3], [4, -1, -1]]))
    np.testing.assert_array_equal(drawn.tokens, [[7, 1, 2, 3], [8, 4, -1, -1]])
    np.testing.assert_array_equal(drawn.parent, [[-1, 0, 1, 2]] * 2)
    plain = tree.chain(ints([7, 8]), jnp.zeros((2, 0), jnp.int32))
    np.testing.assert_array_equal(plain.tokens, [[7], [8]])
    np.testing.assert_array_equal(plain.parent, [[-1], [-1]])


prune = jax.jit(tree.prune, static_argnums=4)
ancestors = jax.jit(tree.ancestors, static_argnums=1)


def pruned(root, tokens, scores, parent, keep):
    return prune(ints(root), ints(tokens), jnp.asarray(scores, jnp.float32), ints(parent), keep)


def test_prune_on_a_hand_example():
    """The best three; parents are renumbered; the tie at -2 goes to the earlier candidate."""
    tokens = [[11, 12, 13, 14, 15]]
    scores = [[-1.0, -2.0, -1.5, -2.0, -9.0]]
    parent = [[-1, -1, 0, 2, 1]]
    for keep, t, p in (
        (1, [5, 11], [-1, 0]),
        (2, [5, 11, 13], [-1, 0, 1]),
        (3, [5, 11, 12, 13], [-1, 0, 0, 1]),
        (4, [5, 11, 12, 13, 14], [-1, 0, 0, 1, 3]),
        (5, [5, 11, 12, 13, 14, 15], [-1, 0, 0, 1, 3, 2]),
    ):
        drawn = pruned([5], tokens, scores, parent, keep)
        np.testing.assert_array_equal(drawn.tokens, [t])
        np.testing.assert_array_equal(drawn.parent, [p])
        assert drawn.tokens.dtype == drawn.parent.dtype == jnp.int32


def prune_longhand(root, tokens, scores, parent, keep):
    order = sorted(range(len(tokens)), key=lambda i: (-scores[i], i))
    best = sorted(order[:keep])
    number = {-1: 0} | {old: new + 1 for new, old in enumerate(best)}
    return (
        [root, *(tokens[i] for i in best)],
        [-1, *(number[parent[i]] for i in best)],  # fails if a parent was lost
    )


@pytest.mark.parametrize("keep", [1, 2, 5, 11, 12])
def test_prune_keeps_the_best_and_the_parents_of_what_it_keeps(keep):
    """Whole tied branches, and drafts scored -1e9, whose children are worth no less in float32."""
    rng = np.random.default_rng(keep)
    rows, pool = 40, 12
    parent, scores = [], np.zeros((rows, pool), np.float32)
    for b in range(rows):
        parent.append([-1, *(int(rng.integers(-1, i)) for i in range(1, pool))])
        for i in range(pool):
            above = np.float32(0) if parent[b][i] < 0 else scores[b, parent[b][i]]
            step = rng.choice([0.0, 0.5, 1.0, 1e9], p=[0.3, 0.3, 0.3, 0.1])
            scores[b, i] = above - np.float32(step)
    tokens, root = rng.integers(0, 99, (rows, pool)), rng.integers(0, 99, rows)
    drawn = pruned(root, tokens, scores, parent, keep)
    assert drawn.tokens.shape == drawn.parent.shape == (rows, keep + 1)
    for b in range(rows):
        t, p = prune_longhand(root[b], tokens[b], scores[b], parent[b], keep)
        np.testing.assert_array_equal(drawn.tokens[b], t)
        np.testing.assert_array_equal(drawn.parent[b], p)
    assert (np.asarray(drawn.parent) < np.arange(keep + 1)).all()
