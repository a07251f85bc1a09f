"""Measuring the machine: seconds of a forward and of a drafter's step, by their sizes."""

import hashlib
import os
import time
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from fastgrpo_jax import base, sharding
from fastgrpo_jax.models import eagle, policy
from fastgrpo_jax.rollout import costs, decode, speculate

T = TypeVar("T")

SLOTS = 128  # of a row's cache, at least
ROWS = (1, 8, 64)  # rows of one token: what their caches add is straight between these
# The ends first, then the middles, so that whenever time runs out the curve is spanned.
SIZES = (1, 64, 8, 256, 2, 16, 32, 4, 128, 512)


def measure(
    config: base.PolicyConfig,
    head: base.EagleConfig | None,
    weights: speculate.Weights,
    *,
    budget_s: float,
    sizes: tuple[int, ...] = SIZES,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    agree: Callable[[T], T] = lambda mine: mine,
) -> costs.Table:
    """Measure the curves, as many of the sizes as the budget allows, three at least.

    Compiling counts too; with a persistent compilation cache it is paid once. Under a mesh each
    device has as many rows or tokens as the curves say. `agree` makes a value that of one process.
    """
    began = clock()
    forward: dict[int, float] = {}
    draft: dict[int, float] = {}
    rows: dict[int, float] = {}
    for size in sizes:
        if len(forward) >= 3 and agree(clock() - began) > budget_s:
            break
        forward[size] = _policy_seconds(config, weights, 1, size, repeats, clock)
        if size in ROWS:
            rows[size] = _policy_seconds(config, weights, size, 1, repeats, clock)
        if head is not None and weights.eagle is not None:
            draft[size] = _draft_seconds(config.mesh, head, weights, size, repeats, clock)
    return agree(costs.Table(device(), smooth(forward), smooth(draft), smooth(rows)))


def smooth(curve: dict[int, float]) -> dict[int, float]:
    """Let no size cost more than a larger one: it was measured while the machine was busy."""
    least, found = float("inf"), {}
    for size in sorted(curve, reverse=True):
        least = found[size] = min(least, curve[size])
    return dict(sorted(found.items()))


def device() -> str:
    """Name what is measured: the kind of the device, and the cores of a CPU."""
    one = jax.devices()[0]
    cores = f", {os.cpu_count()} cores" if one.platform == "cpu" else ""
    return f"{one.platform} {one.device_kind}{cores}"


def _shortest(run: Callable, repeats: int, clock) -> float:
    """Take the shortest of some runs; the first one compiles."""
    best = float("inf")
    for _ in range(repeats + 1):
        began = clock()
        jax.block_until_ready(run())
        best = min(best, clock() - began)
    return best


def _policy_seconds(config, weights, rows, tokens, repeats, clock) -> float:
    """Time forwards of so many rows with so many tokens each."""
    rows *= sharding.shards(config.mesh)
    ids = sharding.put_rows(config.mesh, jnp.zeros((rows, tokens), jnp.int32))
    cache = policy.new_cache(config, rows, max(SLOTS, tokens))
    cache = sharding.put_seats(config.mesh, cache)

    def run():
        nonlocal cache
        out, cache = decode.forward(config, weights.policy, ids, cache)
        return out

    return _shortest(run, repeats, clock)


def _draft_seconds(mesh, head, weights, rows, repeats, clock) -> float:
    """Time the drafter's steps of `rows` rows with one node each."""
    rows *= sharding.shards(mesh)
    cache = sharding.put_seats(mesh, eagle.new_cache(head, rows, SLOTS))
    feature = jnp.zeros((rows, 1, head.hidden), jnp.dtype(head.dtype))
    feature = sharding.put_rows(mesh, feature)

    def run():
        nonlocal cache
        out, cache = decode.draft_step(head, speculate.learned(weights), feature, cache)
        return out

    return _shortest(run, repeats, clock)


def place(folder: str, about: str) -> str:
    """Name the file of a table in a folder of all runs, by the device and by `about`: model
    shape, dtype, drafter. Empty for an empty folder: nothing is kept."""
    if not folder:
        return ""
    name = f"{device()} {about} {jax.__version__} {costs.Table._fields}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return os.path.join(os.path.expanduser(folder), f"costs-{digest}.json")


def cached(folder: str, about: str, make: Callable[[], costs.Table]) -> costs.Table:
    """Read a table from its `place`, or make and keep it."""
    path = place(folder, about)
    table = costs.load(path) if path else None
    if table is None:
        table = make()
        if path:
            costs.save(path, table)
    return table
