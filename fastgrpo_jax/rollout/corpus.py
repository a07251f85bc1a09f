"""What was answered to a prompt before: an n-gram corpus over the steps of a run.

When a prompt comes again, its earlier answers are good guesses at the new ones (RhymeRL, arXiv
2508.18588; DAS, arXiv 2511.13841). They need no alignment: the n-gram drafter finds where a row
stands in them by its latest tokens. The corpus is plain numbers, which a checkpoint keeps; the
prompts that were answered longest ago are forgotten first.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.rollout import draft_ngram

Corpus = dict[str, list[list[int]]]  # prompt's hash: its answers, newest first; JSON values only


def learn(
    corpus: Corpus,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    answers: int,
    tokens: int,
) -> Corpus:
    """Add the responses to P prompts, G of each in turn.

    Of a prompt the newest `answers` are kept, of all prompts as many as have `tokens` tokens.
    """
    corpus = dict(corpus)
    group = len(responses) // max(len(prompts), 1)
    for i, prompt in enumerate(prompts):
        said = responses[i * group : (i + 1) * group]
        name = base.prompt_key(prompt)
        corpus[name] = [*map(list, said), *corpus.pop(name, [])][
            :answers
        ]  # popped: to the end of the line
    room = tokens - sum(len(row) for rows in corpus.values() for row in rows)
    for name in list(corpus):
        if room >= 0:
            break
        room += sum(map(len, corpus.pop(name)))
    return corpus


def recall(
    corpus: Corpus, prompts: Sequence[Sequence[int]], *, answers: int, tail: int, width: int
) -> draft_ngram.Earlier:
    """Lay out the newest `answers` of each prompt, each behind the prompt's last `tail` tokens.

    Rows are cut at `width` tokens.
    """
    tokens = np.full((len(prompts), answers, width), -1, np.int32)
    length = np.zeros((len(prompts), answers), np.int32)
    for i, prompt in enumerate(prompts):
        for j, said in enumerate(corpus.get(base.prompt_key(prompt), [])[:answers]):
            row = [*prompt[-tail:], *said][:width]
            tokens[i, j, : len(row)] = row
            length[i, j] = len(row)
    return draft_ngram.Earlier(jnp.asarray(tokens), jnp.asarray(length))
