import json

import numpy as np

from fastgrpo_jax.rollout import corpus


def learn(known, prompts, responses, answers=3, tokens=100):
    return corpus.learn(known, prompts, responses, answers=answers, tokens=tokens)


def recall(known, prompts, answers=3, tail=2, width=6):
    found = corpus.recall(known, prompts, answers=answers, tail=tail, width=width)
    length = np.asarray(found.length)
    rows = [
        [list(map(int, row[:n])) for row, n in zip(group, ns) if n]
        for group, ns in zip(np.asarray(found.tokens), length)
    ]
    assert found.tokens.shape == (len(prompts), answers, width)
    assert (np.asarray(found.tokens) == -1).sum() == found.tokens.size - length.sum()
    return rows


def test_answers_come_back_behind_the_end_of_their_prompt_newest_first():
    a, b, new = (1, 2, 3), (4,), (9, 9)
    known = learn({}, [a, b], [[10], [11, 12], [20], [21]])
    assert recall(known, [b, new, a]) == [
        [[4, 20], [4, 21]],
        [],
        [[2, 3, 10], [2, 3, 11, 12]],
    ]
    known = learn(known, [a], [[13], [14]])
    assert recall(known, [a]) == [[[2, 3, 13], [2, 3, 14], [2, 3, 10]]]
    assert recall(known, [a], answers=1, width=2, tail=1) == [[[3, 13]]]


def test_what_was_answered_longest_ago_is_forgotten_when_the_tokens_are_too_many():
    known = learn({}, [(1,), (2,)], [[5] * 4, [6] * 4])
    known = learn(known, [(1,)], [[7] * 4], tokens=12)
    assert recall(known, [(1,), (2,)]) == [[[1, 7, 7, 7, 7], [1, 5, 5, 5, 5]], [[2, 6, 6, 6, 6]]]
    known = learn(known, [(3,)], [[8] * 2], tokens=13)  # 2 is the oldest, by its last answer
    assert recall(known, [(1,), (2,), (3,)], width=3) == [
        [[1, 7, 7], [1, 5, 5]], [], [[3, 8, 8]],
    ]  # fmt: skip
    assert learn(known, [(3,)], [[8] * 2], tokens=0) == {}


def test_a_checkpoint_can_keep_it():
    known = learn({}, [(1,)], [[5, 6]])
    assert json.loads(json.dumps(known)) == known


def test_what_is_learned_leaves_what_was_known_alone():
    known = learn({}, [(1,)], [[5]])
    before = json.dumps(known)
    learn(known, [(1,)], [[6]])
    assert json.dumps(known) == before
