import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.rollout import draft_ngram


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def compiled(sequences, rows, group, depth, longest, earlier=None):
    return draft_ngram.propose(sequences, rows, group, depth, longest, earlier)[0]


def sequences(lines, span):
    tokens = np.full((len(lines), span), -1, np.int32)
    for row, line in zip(tokens, lines):
        row[: len(line)] = line
    n = len(lines)
    zeros, nothing = jnp.zeros((n, span), jnp.float32), jnp.zeros(n, bool)
    length = jnp.asarray([len(line) for line in lines], jnp.int32)
    return base.Sequences(
        jnp.asarray(tokens), zeros, zeros, length, length, length, nothing, nothing
    )


def propose(lines, rows, group, depth, longest, span=14, earlier=None):
    known = None
    if earlier is not None:  # P prompts with E texts each
        flat = sequences([text for texts in earlier for text in texts], span)
        shape = (len(earlier), len(earlier[0]))
        known = draft_ngram.Earlier(flat.tokens.reshape(*shape, span), flat.length.reshape(shape))
    out = compiled(
        sequences(lines, span), jnp.asarray(rows, jnp.int32), group, depth, longest, known
    )
    assert out.shape == (len(rows), depth) and out.dtype == jnp.int32
    return np.asarray(out)


def longhand(lines, row, group, depth, longest, earlier=()):
    """Try every place of every text; rank by match, then own before sibling before earlier ones,
    then late before early."""
    own = lines[row]
    best = None
    first = row // group * group
    texts = [*lines[first : first + group], *(earlier[row // group] if earlier else ())]
    for member, text in enumerate(texts):
        near = (member < group) + (member == row - first)
        for end in range(len(text) - 1):
            match = 0
            while (
                match < min(longest, end + 1, len(own))
                and text[end - match] == own[len(own) - 1 - match]
            ):
                match += 1
            rank = (match, near, end, -member)
            if match and (best is None or rank > best[0]):
                best = (rank, text[end + 1 : end + 1 + depth])
    found = list(best[1]) if best else []
    return found + [-1] * (depth - len(found))


@pytest.mark.parametrize("group, longest, depth", [(1, 3, 3), (3, 1, 2), (3, 3, 4), (2, 5, 1)])
def test_proposals_are_those_of_trying_every_place(group, longest, depth):
    """Random short texts over two or three letters, prompts that must not leak into others."""
    rng = np.random.default_rng(group * 100 + longest)
    rows = 2 * group
    for trial in range(60):
        letters = 2 + trial % 3
        lines = [list(rng.integers(0, letters, rng.integers(1, 15))) for _ in range(rows)]
        lines = [[int(t) for t in line] for line in lines]
        ours = propose(lines, np.arange(rows), group, depth, longest)
        for r in range(rows):
            assert list(ours[r]) == longhand(lines, r, group, depth, longest), (lines, r)


@pytest.mark.parametrize("count", (1, 3))
def test_earlier_answers_are_looked_in_last(count):
    rng = np.random.default_rng(count)

    def text(least):
        return [int(t) for t in rng.integers(0, 3, rng.integers(least, 15))]

    helped = 0
    for _ in range(60):
        lines = [text(1) for _ in range(4)]
        earlier = [[text(0) for _ in range(count)] for _ in range(2)]
        ours = propose(lines, np.arange(4), 2, 3, 4, earlier=earlier)
        alone = propose(lines, np.arange(4), 2, 3, 4)
        helped += int((ours != alone).any(axis=1).sum())
        for r in range(4):
            assert list(ours[r]) == longhand(lines, r, 2, 3, 4, earlier), (lines, earlier, r)
    assert helped > 20


def one(own, siblings=(), depth=3, longest=3, span=14):
    lines = [own, *siblings]
    return list(propose(lines, [0], len(lines), depth, longest, span)[0])


def test_the_longest_match_wins():
    assert one([1, 2, 3, 7, 9, 3, 8, 1, 2, 3]) == [7, 9, 3]  # not the later 3 -> 8
    assert one([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], longest=1) == [8, 1, 2]
    assert one([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 1, 2, 3, 4], longest=4) == [5, 9, 2]
    assert one([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 1, 2, 3, 4], longest=3) == [6, 1, 2]


def test_of_equal_matches_the_rows_own_comes_before_a_siblings_and_the_latest_wins():
    assert one([4, 5, 4, 6, 4], [[1, 1, 1, 1, 1, 4, 7, 7]]) == [6, 4, -1]
    assert one([5, 4], [[4, 7, 7], [4, 8, 8, 4, 9]]) == [9, -1, -1]


def test_a_longer_match_of_a_sibling_comes_before_the_rows_own():
    assert one([2, 4, 6, 1, 4], [[1, 4, 7, 8]]) == [7, 8, -1]


def test_unknown_is_never_proposed():
    """No match, nothing to match with, what lies beyond a text's end, the row's own end itself."""
    assert one([1, 2, 3]) == [-1, -1, -1]
    assert one([1]) == [-1, -1, -1]
    assert one([1, 1]) == [1, -1, -1]
    assert one([5], [[5]]) == [-1, -1, -1]  # the sibling knows no more either
    assert one([5], [[5, 6]]) == [6, -1, -1]
    assert one([0, 1], [[7, 0]]) == [-1, -1, -1]  # its last token is followed by nothing


def test_a_full_line_is_read_to_its_very_end():
    """No wrap from the last column to the first, on either side of a match."""
    assert one([1, 2, 3, 1], span=4) == [2, 3, 1]
    assert one([3, 9, 1, 3], span=4, depth=4) == [9, 1, 3, -1]
    # [1, 1] would match at column 0 if the compare wrapped round to the last column.
    assert one([1, 5, 3, 1, 6, 1, 1], span=7, depth=1) == [1]


def test_an_empty_slot_gets_tokens_without_disturbing_the_others():
    """rows == N is an empty slot; live rows may stand in any order."""
    lines = [[1, 2, 1], [3, 4, 3], [5, 6, 5], [7, 8, 7]]
    ours = propose(lines, [3, 4, 0, 4], 2, 1, 2)
    np.testing.assert_array_equal(ours[[0, 2]], [[8], [2]])
