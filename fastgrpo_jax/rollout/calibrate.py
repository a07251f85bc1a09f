"""Measuring the machine: the knee C_peak of throughput against tokens per forward."""

import time

import jax
import jax.numpy as jnp

from fastgrpo_jax import base
from fastgrpo_jax.models import policy
from fastgrpo_jax.rollout import decode, strategy

SLOTS = 64  # a short cache: the knee is one of the weights' matmuls


def c_peak(
    config: base.PolicyConfig,
    weights: decode.Weights,
    *,
    largest: int = 512,
    repeats: int = 3,
    clock=time.perf_counter,
) -> int:
    """Measure the smallest batch of one-token forwards with 95 % of the best tokens/s.

    Batches are the powers of two; it stops when two doublings in a row gained less than 5 %.
    """
    rates: dict[int, float] = {}
    rows = 1
    while rows <= largest:
        rates[rows] = rows / _seconds(config, weights, rows, repeats, clock)
        earlier = [rate for batch, rate in rates.items() if batch <= rows // 4]
        if earlier and max(rates.values()) < 1.05 * max(earlier):
            break
        rows *= 2
    return strategy.knee(rates)


def _seconds(config, weights, rows, repeats, clock) -> float:
    """Take the shortest of some forwards of `rows` rows with one token each."""
    tokens = jnp.zeros((rows, 1), jnp.int32)
    cache = policy.new_cache(config, rows, SLOTS)
    best = float("inf")
    for _ in range(repeats + 1):  # the first one compiles
        began = clock()
        out, cache = decode.forward(config, weights.policy, tokens, cache)
        jax.block_until_ready(out)
        best = min(best, clock() - began)
    return best
