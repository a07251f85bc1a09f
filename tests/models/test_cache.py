import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastgrpo_jax import base
from fastgrpo_jax.models import cache

B, K, S, H = 4, 2, 10, 3
write = jax.jit(cache.write)
move = jax.jit(cache.move)
resize = jax.jit(cache.resize, static_argnums=2)


def ints(x):
    return jnp.asarray(x, jnp.int32)


def numbered(rows=B, slots=S, start=0):
    """Fill a cache array with distinct numbers."""
    size = rows * K * slots * H
    return np.arange(start, start + size, dtype=np.float32).reshape(rows, K, slots, H)


def a_cache(layers=2):
    k = tuple(jnp.asarray(numbered(start=10_000 * i)) for i in range(layers))
    v = tuple(jnp.asarray(numbered(start=-10_000 * (i + 1))) for i in range(layers))
    return base.KVCache(k, v)


def test_an_empty_cache_has_one_array_per_layer():
    new = cache.init(3, B, K, S, H, jnp.bfloat16)
    assert len(new.k) == len(new.v) == 3
    for x in (*new.k, *new.v):
        assert x.shape == (B, K, S, H) and x.dtype == jnp.bfloat16 and not x.any()


@pytest.mark.parametrize("count", [1, 3, S])
def test_a_write_lands_at_each_rows_own_start_and_drops_what_does_not_fit(count):
    """D4, D7: beyond the last slot entries vanish; none is pushed back over valid slots."""
    for starts in ([0, 1, 5, 7], [S - 1, S - 2, S, S + 4], [8, 0, 9, 3]):
        new = -1.0 - numbered(slots=count)
        expected = numbered()
        for b, start in enumerate(starts):
            for t in range(count):
                if start + t < S:
                    expected[b, :, start + t] = new[b, :, t]
        out = write(jnp.asarray(numbered()), jnp.asarray(new), ints(starts))
        np.testing.assert_array_equal(out, expected)


def test_a_write_casts_to_the_caches_dtype():
    out = write(
        jnp.zeros((1, 1, 2, 1), jnp.bfloat16), jnp.full((1, 1, 1, 1), 1.00390625), ints([1])
    )
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out[0, 0, :, 0].astype(np.float32), [0, 1])


def move_longhand(x, start, nodes):
    out = x.copy()
    for b, path in enumerate(nodes):
        for i, node in enumerate(path):
            if start[b] + i < x.shape[2]:
                out[b, :, start[b] + i] = x[b, :, min(start[b] + node, x.shape[2] - 1)]
    return out


@pytest.mark.parametrize("seed", range(4))
def test_a_move_packs_the_accepted_path_behind_the_prefix(seed):
    """D7: every layer, keys and values; sources are read before any is overwritten."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, S - 4, B)
    nodes = np.sort(rng.integers(1, 5, (B, 3)), axis=1)
    nodes[:, 0] = 0  # the root stays
    before = a_cache()
    after = move(before, ints(start), ints(nodes))
    assert len(after.k) == len(after.v) == 2
    for old, new in zip((*before.k, *before.v), (*after.k, *after.v)):
        np.testing.assert_array_equal(new, move_longhand(np.asarray(old), start, nodes))


def test_a_move_reads_before_it_writes_and_drops_beyond_the_last_slot():
    before = a_cache(1)
    start, nodes = [2, 0, S - 2, S - 2], [[0, 2, 1], [2, 0, 1], [0, 1, 1], [0, 5, 7]]
    after = move(before, ints(start), ints(nodes))
    old, new = np.asarray(before.k[0]), np.asarray(after.k[0])
    np.testing.assert_array_equal(new[0, :, 2:5], old[0, :, [2, 4, 3]].swapaxes(0, 1))
    np.testing.assert_array_equal(new[1, :, :3], old[1, :, [2, 0, 1]].swapaxes(0, 1))
    np.testing.assert_array_equal(new[2:], old[2:])  # a source beyond the last slot is the last


@pytest.mark.parametrize("slots", [S - 3, S, S + 5])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 1], [2], [0, 0, 3, 3, 1], [1, B, B + 7, 2]])
def test_a_resize_takes_rows_and_cuts_or_pads_slots(rows, slots):
    """Compaction, replication over a group, growth; a row out of range is an empty one."""
    before = a_cache()
    after = resize(before, ints(rows), slots)
    for old, new in zip((*before.k, *before.v), (*after.k, *after.v)):
        expected = np.zeros((len(rows), K, slots, H), np.float32)
        common = min(slots, S)
        for c, row in enumerate(rows):
            if row < B:
                expected[c, :, :common] = np.asarray(old)[row, :, :common]
        np.testing.assert_array_equal(new, expected)
        assert new.dtype == old.dtype
