"""Packing the sequences of a step into bins of a fixed number of places, on the host.

A bin is a row of the forward, and every bin that is filled costs the same, so as few as possible
are filled (the fixed token budget of C3PO, arXiv 2506.14731). The arrays have room for as many as
the longest sequences would need, so lengths never change a shape.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from fastgrpo_jax import base
from fastgrpo_jax.train import layout


def bins_for(sequences: int, longest: int, budget: int) -> int:
    """Count the bins that any sequences of at most `longest` tokens fit into.

    First fit opens a bin only if every other one holds budget // longest sequences or more.

    Raises:
      base.UserError: a sequence may be longer than a bin.
    """
    if budget < longest:
        raise base.UserError(
            f"optim.token_budget is {budget}; allowed: {longest} or more, the longest sequence"
        )
    return -(-sequences // (budget // longest))


def pack(
    prompt_length: Int[np.ndarray, " N"],
    length: Int[np.ndarray, " N"],
    group: int,
    longest: int,
    budget: int,
    devices: int = 1,
) -> layout.Packed:
    """Pack sequences of which each `group` that follow one another share a prompt; `devices` run
    a bin each at a time.

    Longest first, each goes where it takes the fewest places (a prompt that is there already takes
    none), into the first of such bins. A bin holds its responses, then its prompts. Sequences
    without a response are left out. The same lengths are always packed alike.

    Raises:
      base.UserError: a sequence is longer than `longest`, or that than `budget`.
    """
    if len(length) and length.max() > longest:
        raise base.UserError(
            f"a sequence has {length.max()} tokens; allowed: {longest} at most, the longest that "
            "optim.token_budget was planned for"
        )
    bins = bins_for(len(length), longest, budget)
    chosen = assign(prompt_length, length, group, bins, budget)
    count, start = chosen.max(initial=-1) + 1, np.zeros(len(length), np.int32)
    room = -(-bins // devices) * devices, budget
    sequence, position, previous = (np.full(room, x, np.int32) for x in (-1, 0, -1))
    for b in range(count):
        members = np.flatnonzero(chosen == b)
        _, first, of_prompt = np.unique(members // group, return_index=True, return_inverse=True)
        pieces = [(n, prompt_length[n], length[n]) for n in members]
        pieces += [(n, 0, prompt_length[n]) for n in members[first]]
        ends = np.cumsum([end - begin for _, begin, end in pieces])
        for (n, begin, end), stop in zip(pieces, ends):
            spots = slice(stop - (end - begin), stop)
            sequence[b, spots], position[b, spots] = n, np.arange(begin, end)
        start[members] = ends[: len(members)] - (length - prompt_length)[members]
        prompt_ends = ends[len(members) :]
        previous[b, : ends[-1]] = np.arange(-1, ends[-1] - 1)
        previous[b, prompt_ends - prompt_length[members[first]]] = -1
        previous[b, start[members]] = prompt_ends[of_prompt] - 1
    parts = np.int32(count), sequence, position, previous, chosen, start
    return layout.Packed(*map(jnp.asarray, parts))


def statistics(packed: layout.Packed) -> dict[str, float]:
    """Count the bins that are filled, and the share of their places that hold a token."""
    count, sequence = int(packed.count), np.asarray(packed.sequence)
    filled = float((sequence[:count] >= 0).mean()) if count else 0.0
    return {"pack/bins": float(count), "pack/filled": filled}


def assign(
    prompt_length: Int[np.ndarray, " N"],
    length: Int[np.ndarray, " N"],
    group: int,
    bins: int,
    budget: int,
) -> Int[np.ndarray, " N"]:
    """Choose each sequence's bin; -1 for those without a response."""
    free = np.full(bins, budget)
    prompted = np.zeros((bins, -(-len(length) // group)), bool)
    chosen = np.full(len(length), -1, np.int32)
    for n in np.argsort(-length, kind="stable"):
        if length[n] == prompt_length[n]:
            continue
        cost = np.where(prompted[:, n // group], length[n] - prompt_length[n], length[n])
        best = np.argmin(np.where(cost <= free, cost, budget + 1))
        chosen[n] = best
        free[best] -= cost[best]
        prompted[best, n // group] = True
    return chosen
