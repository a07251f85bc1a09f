"""How long a prompt's responses have been, to answer the long ones first.

A running mean per prompt, told apart by its token ids; the oldest are forgotten.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from fastgrpo_jax import base

Lengths = dict[str, list[float]]  # prompt's hash: [mean tokens, responses]; JSON values only
KEPT = 20_000  # prompts


def expect(seen: Lengths, prompts: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Estimate each prompt's response length; an unknown one gets the mean of the known."""
    keys = [base.prompt_key(p) for p in prompts]
    known = [seen[k][0] for k in keys if k in seen]
    usual = float(np.mean(known)) if known else 0.0
    return tuple(seen[k][0] if k in seen else usual for k in keys)


def learn(
    seen: Lengths, prompts: Sequence[Sequence[int]], lengths: Iterable[Sequence[int]]
) -> Lengths:
    """Add each prompt's response lengths, given group by group."""
    seen = dict(seen)
    for prompt, group in zip(prompts, lengths):
        key = base.prompt_key(prompt)
        mean, count = seen.pop(key, [0.0, 0.0])
        total = count + len(group)
        seen[key] = [mean + (float(np.sum(group)) - mean * len(group)) / total, float(total)]
    return dict(list(seen.items())[-KEPT:])
