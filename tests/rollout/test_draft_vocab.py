"""The draft vocabulary: which ids, and that it restricts the drafter and nothing else."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax.models import policy
from fastgrpo_jax.rollout import decode, draft_eagle, draft_vocab, speculate
from tests.rollout import toys


def test_the_most_frequent_ids_are_kept_then_the_lowest():
    counts = draft_vocab.count([[5, 9, 9], [9, 7, 7]])
    assert counts == {"5": 1, "9": 3, "7": 2}
    assert draft_vocab.count([[5]], counts) == {"5": 2, "9": 3, "7": 2}
    assert draft_vocab.rank(counts, 2, 12).tolist() == [7, 9]
    assert draft_vocab.rank(counts, 5, 12).tolist() == [0, 1, 5, 7, 9]
    assert draft_vocab.rank(counts, 2, 12, always=(11,)).tolist() == [9, 11]
    assert draft_vocab.rank({}, 12, 12).tolist() == list(range(12))


def test_coverage_is_the_share_of_emitted_ids_that_could_be_proposed():
    ids = np.array([1, 2, 3], np.int32)
    assert draft_vocab.coverage(ids, [[1, 2, 9, 9], []]) == 0.5
    assert math.isnan(draft_vocab.coverage(ids, []))


@pytest.mark.parametrize("shared", (True, False))
def test_drafting_from_some_ids_is_drafting_from_all_with_the_others_impossible(shared):
    """The same tree comes out, ids mapped back, under the noise of the ids themselves."""
    spec, rows, depth, width = toys.SPEC, 4, 3, 2
    strategy = toys.fixed(f"learned:{depth}:{width}:6").possible(rows)[0]
    rng = np.random.default_rng(3)
    ids = np.sort(rng.choice(toys.VOCAB, 20, replace=False)).astype(np.int32)
    state = draft_eagle.init(spec.eagle, rows, 24)
    state = state._replace(
        feature=jnp.asarray(rng.normal(size=state.feature.shape), jnp.float32),
        hidden=jnp.asarray(rng.normal(size=state.hidden.shape), jnp.float32),
        fed=jnp.full(rows, 3, jnp.int32),
    )
    noise = jnp.asarray(rng.gumbel(size=(rows, depth + 1, toys.VOCAB)), jnp.float32)
    weights = decode.with_draft_vocab(toys.weights(), ids)
    other = np.setdiff1d(np.arange(toys.VOCAB), ids)

    def propose(w, noise):
        return draft_eagle.propose(
            spec.eagle, w, state, jnp.arange(rows, dtype=jnp.int32), noise,
            jnp.ones(rows, jnp.float32), jnp.float32(1), strategy, shared,
        )[0]  # fmt: skip

    some = propose(speculate.learned(weights), noise)
    assert set(np.asarray(some.tokens[:, 1:]).ravel()) <= set(ids.tolist())
    whole = speculate.learned(toys.weights())
    masked = _without(other, lambda: propose(whole, noise))
    np.testing.assert_array_equal(some.tokens, masked.tokens)
    np.testing.assert_array_equal(some.parent, masked.parent)


def _without(other, draft):
    """Draft while the logits of some ids are put far down."""
    real = policy.logits

    def logits(features, head):
        return real(features, head).at[..., other].add(-1e6)

    patch = pytest.MonkeyPatch()
    patch.setattr(policy, "logits", logits)
    try:
        return draft()
    finally:
        patch.undo()


def test_a_draft_vocabulary_changes_no_token():
    """Law 1, with half of the ids out of the drafter's reach."""
    ids = np.arange(0, toys.VOCAB, 2, dtype=np.int32)
    weights = decode.with_draft_vocab(toys.weights(), ids)
    for text in ("learned:3:1:4", "learned:3:3:8"):
        run = toys.rollout(toys.engine(rounds=3), weights, toys.fixed(text))
        toys.assert_same(run.batch, toys.plain().batch)
    assert toys.accepted_share(run) > 0
