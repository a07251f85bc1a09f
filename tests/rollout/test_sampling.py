import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fastgrpo_jax.rollout import sampling

MASK = 2**32 - 1
gumbel = jax.jit(sampling.gumbel)
kept = jax.jit(sampling.kept)
draw = jax.jit(sampling.draw)
top = jax.jit(sampling.top, static_argnums=1)


def threefry_longhand(key, x):
    """Threefry-2x32 with 20 rounds on Python integers (Salmon et al. 2011)."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = (x[0] + keys[0]) & MASK, (x[1] + keys[1]) & MASK
    for r in range(20):
        a = (a + b) & MASK
        turn = (13, 15, 26, 6, 17, 29, 16, 24)[r % 8]
        b = ((b << turn | b >> (32 - turn)) & MASK) ^ a
        if r % 4 == 3:
            i = r // 4 + 1
            a = (a + keys[i % 3]) & MASK
            b = (b + keys[(i + 1) % 3] + i) & MASK
    return a, b


def row_key_longhand(seed, step, place, sample):
    def words(x):
        return x & MASK, (x >> 32) & MASK

    key = threefry_longhand(words(seed), words(step))
    key = threefry_longhand(key, words(place))
    return threefry_longhand(key, (sample & MASK, 0))


def row_keys(seed, step, places, samples):
    return np.asarray(
        sampling.row_keys(seed, step, np.asarray(places, np.int64), np.asarray(samples, np.int64))
    )


def noise(key, position, ids):
    key = jnp.asarray(key, jnp.uint32)
    return np.asarray(gumbel(key, jnp.asarray(position, jnp.int32), jnp.asarray(ids, jnp.int32)))


# --- the hash ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, counter, expected",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((MASK, MASK), (MASK, MASK), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_known_answers(key, counter, expected):
    assert threefry_longhand(key, counter) == expected
    words = [jnp.uint32(x) for x in (*key, *counter)]
    assert tuple(int(x) for x in sampling.threefry(*words)) == expected


def test_threefry_equals_the_library_element_by_element():
    words = np.random.default_rng(0).integers(0, 2**32, (2, 500), np.uint32)
    x0, x1 = jnp.asarray(words)
    for key in ([0, 0], [1, 0], [0, 1], [MASK, 5], [0x9E3779B9, 0x85EBCA6B]):
        pair = jnp.asarray(key, jnp.uint32)
        ours = sampling.threefry(pair[0], pair[1], x0, x1)
        theirs = jax.extend.random.threefry_2x32(pair, jnp.concatenate([x0, x1]))
        np.testing.assert_array_equal(np.concatenate(ours), theirs)


# --- addresses --------------------------------------------------------------------------------


def test_row_keys_are_the_hash_of_the_whole_address():
    """Seed, step, place and sample each with all their bits; negative seeds are seeds too."""
    for seed in (0, 1, -1, -(2**40), 2**32, 2**63 - 1, 2**64 + 5):
        for step in (0, 3, 2**32 + 3):
            places, samples = [0, 1, 2**32, 2**32 + 1, 2**62], [0, 7, 1, 0, 63]
            expected = [row_key_longhand(seed, step, p, s) for p, s in zip(places, samples)]
            np.testing.assert_array_equal(row_keys(seed, step, places, samples), expected)


def test_no_two_addresses_share_a_key():
    """D24: neither the samples of a group, nor seeds, steps and places that swap their values."""
    wide = [0, 1, 2, 3, 2**31, 2**32, 2**32 + 1, 2**40]
    keys = [
        row_keys(seed, step, np.repeat(wide, 4), np.tile([0, 1, 2, 3], len(wide)))
        for seed in (0, 1, 2, -1, -2, 2**32, 2**40, -(2**40))
        for step in (0, 1, 2, 2**32)
    ]
    keys = np.concatenate(keys)
    assert len(np.unique(keys, axis=0)) == len(keys) == 8 * 4 * 8 * 4


def test_noise_is_the_gumbel_of_the_hashed_position_and_id():
    keys = row_keys(5, 2, [9, 2**33], [1, 0])
    position, ids = [3, 70000], [0, 1, 2, 49151, 2**31 - 1]
    expected = np.empty((2, 5))
    for r in range(2):
        for i, token in enumerate(ids):
            bits, _ = threefry_longhand(tuple(map(int, keys[r])), (token, position[r]))
            expected[r, i] = -np.log(-np.log1p(-(bits + 0.5) / 2**32))
    ours = noise(keys, position, ids)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=2e-6)


def test_each_part_of_the_address_changes_all_of_the_noise():
    """D24: seed, step, place (its high word too), sample, position and token id."""

    def at(seed=0, step=0, place=0, sample=0, position=0, first=0):
        ids = np.arange(first, first + 50)
        return noise(row_keys(seed, step, [place], [sample]), [position], ids)[0]

    others = [
        at(seed=1),
        at(seed=-1),
        at(seed=2**32),
        at(step=1),
        at(place=1),
        at(place=2**32),
        at(sample=1),
        at(position=1),
        at(first=50),
    ]
    for i, a in enumerate([at(), *others]):
        for b in others[i:]:
            assert (a != b).all()
    np.testing.assert_array_equal(at(), at())


def test_noise_of_an_id_is_the_same_in_any_set_and_order_of_ids():
    """A draft vocabulary, a padded one or a shard of one sees the very noise of the whole."""
    rng = np.random.default_rng(1)
    key, position = row_keys(0, 1, [4], [2]), [17]
    whole = noise(key, position, np.arange(1003))
    for size in (1, 7, 128, 1000):
        ids = rng.permutation(1003)[:size]
        np.testing.assert_array_equal(noise(key, position, ids), whole[:, ids])
    for vocab in (1, 50, 129, 2048):
        some = noise(key, position, np.arange(vocab))
        common = min(vocab, 1003)
        np.testing.assert_array_equal(some[:, :common], whole[:, :common])


def test_noise_does_not_depend_on_a_rows_place_in_the_batch():
    """D24: alone, permuted, repeated, or for several positions of a row at one time."""
    keys = row_keys(3, 0, [0, 0, 1, 1, 2], [0, 1, 0, 1, 0])
    position = np.array([5, 6, 7, 8, 9])
    ids = np.arange(200)
    whole = noise(keys, position, ids)
    for rows in ([0], [4], [4, 2, 0, 1, 3], [1, 1, 3], [0, 1, 2, 3, 4, 4, 4, 4]):
        np.testing.assert_array_equal(noise(keys[rows], position[rows], ids), whole[rows])
    ahead = position[:, None] + np.arange(3)
    wide = noise(np.broadcast_to(keys[:, None], (5, 3, 2)), ahead, ids)
    for d in range(3):
        np.testing.assert_array_equal(wide[:, d], noise(keys, position + d, ids))
    np.testing.assert_array_equal(wide[:, 0], whole)


# --- the distribution of the noise ------------------------------------------------------------


@pytest.mark.parametrize("along", ["ids", "positions", "samples"])
def test_noise_is_gumbel_distributed_and_independent_along(along):
    n = 200_000
    if along == "ids":
        x = noise(row_keys(0, 0, [0], [0]), [0], np.arange(n))[0]
    elif along == "positions":
        key = np.broadcast_to(row_keys(0, 0, [0], [0]), (n, 2))
        x = noise(key, np.arange(n), [11])[:, 0]
    else:
        x = noise(row_keys(0, 0, np.zeros(n), np.arange(n)), np.zeros(n), [11])[:, 0]
    x = x.astype(np.float64)
    cdf = np.sort(np.exp(-np.exp(-x)))
    distance = np.abs(cdf - (np.arange(n) + 0.5) / n).max()
    assert distance < 1.95 / np.sqrt(n)  # Kolmogorov-Smirnov at 0.1 %
    assert abs(x.mean() - np.euler_gamma) < 4 * x.std() / np.sqrt(n)
    assert abs(x.var() - np.pi**2 / 6) < 0.04
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(cdf_of(x[:-lag]), cdf_of(x[lag:]))[0, 1]) < 4 / np.sqrt(n)


def cdf_of(x):
    return np.exp(-np.exp(-x))


def test_the_extreme_words_give_the_extreme_noise_and_stay_finite(monkeypatch):
    """Word 0 is worth -log(2^-33): a token of that chance can still win. The largest is finite."""
    words = np.array([0, 1, 2, 2**16, 2**31, MASK - 255, MASK], np.uint32)
    monkeypatch.setattr(sampling, "threefry", lambda *_: (jnp.asarray(words)[None], None))
    x = sampling.gumbel(
        jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), jnp.zeros(7, jnp.int32)
    )
    v = np.minimum((words + 0.5) / 2**32, 1 - 2.0**-24)
    np.testing.assert_allclose(x[0], -np.log(-np.log1p(-v)), rtol=1e-5)
    np.testing.assert_allclose(x[0, 0], 33 * np.log(2), rtol=1e-6)
    assert np.isfinite(x).all() and (np.diff(x[0]) < 0)[:5].all()


# --- the blocked maximum ----------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 5, 127, 128, 129, 256, 300, 640, 1000])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_is_a_stable_sort(vocab, k):
    """Ties go to the lower id, in one block or over several; -inf comes last, in id order."""
    rng = np.random.default_rng(vocab + k)
    k = min(k, vocab)
    rows = [
        rng.normal(size=vocab),
        rng.integers(0, 3, vocab),
        np.zeros(vocab),
        np.full(vocab, -np.inf),
        np.where(rng.random(vocab) < 3 / vocab, 1.0, -np.inf),
        -np.arange(vocab),
        np.arange(vocab),
        np.where(np.arange(vocab) == vocab - 1, 0.0, -np.inf),
    ]
    x = np.stack(rows).astype(np.float32)
    expected = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    values, ids = top(jnp.asarray(x), k)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis=-1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1100,), (2, 3, 1100)])
def test_top_takes_any_leading_shape_and_keeps_the_dtype(shape, dtype):
    x = np.random.default_rng(0).integers(0, 40, shape).astype(dtype)
    values, ids = top(jnp.asarray(x), 8)
    expected = np.argsort(-x, axis=-1, kind="stable")[..., :8]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis=-1))
    assert values.dtype == dtype


def test_top_finds_more_entries_than_there_are_blocks():
    x = np.random.default_rng(0).normal(size=(2, 300)).astype(np.float32)
    for k in (3, 100, 300):
        np.testing.assert_array_equal(top(jnp.asarray(x), k)[1], np.argsort(-x)[:, :k])


# --- temperature ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_perturb_divides_adds_the_cast_noise_and_is_plain_at_zero(dtype):
    logits = jnp.asarray([[1.0, -2.0, 0.5], [3.0, 4.0, -1.0]], dtype)
    g = jnp.asarray([[0.25, 1.5, -0.5], [np.nan, np.inf, 1.0]], jnp.float32)
    out = sampling.perturb(logits, g, jnp.asarray([0.5, 0.0], jnp.float32))
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, [[2.25, -2.5, 0.5], [3.0, 4.0, -1.0]])
    t = sampling.divisor(jnp.asarray([0.0, 0.25, 2.0], jnp.float32), dtype)
    np.testing.assert_array_equal(t, [1.0, 0.25, 2.0])
    assert t.dtype == dtype


# --- filters ----------------------------------------------------------------------------------


def kept_longhand(row, top_k, top_p):
    """Top-k, then top-p on what is left, with everything that ties with the last one."""
    row = row.astype(np.float64)
    inside = np.ones(len(row), bool)
    if 0 < top_k < len(row):
        inside = row >= np.sort(row)[::-1][top_k - 1]
    if top_p < 1:
        weight = np.where(inside, np.exp(row - row.max()), 0)
        order = np.argsort(-row, kind="stable")
        mass = np.cumsum(weight[order]) / weight.sum()
        assert np.abs(mass - top_p).min() > 1e-6, "the example is a near tie: choose another"
        inside &= row >= row[order[np.argmax(mass >= top_p)]]
    return inside


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab", [1, 7, 150])
def test_filters_keep_what_a_sort_would(vocab, dtype):
    rng = np.random.default_rng(vocab)
    n = 240
    x = rng.normal(size=(n, vocab)) * rng.choice([0.01, 1.0, 20.0], (n, 1))
    x[::3] = np.round(x[::3])  # ties
    x[1::5] -= 1000.0  # all negative, far from 0
    x[2::7, rng.permutation(vocab)[: vocab // 3]] = -np.inf
    x = x.astype(dtype) + 0  # no -0.0, which counts as less than 0.0
    k = rng.choice([0, 1, 2, 3, 5, vocab - 1, vocab, vocab + 1, 10**6], n).astype(np.int32)
    k = np.maximum(k, 0)
    p = rng.choice([1e-9, 0.1234567, 0.5432107, 0.9012345, 0.9987654, 1.0], n).astype(np.float32)
    ours = kept(jnp.asarray(x), jnp.asarray(k), jnp.asarray(p))
    for i in range(n):
        expected = kept_longhand(x[i], int(k[i]), float(p[i]))
        np.testing.assert_array_equal(ours[i], expected, err_msg=f"row {i}, k {k[i]}, p {p[i]}")


def test_filters_on_a_hand_example():
    """D11: top-p acts on the mass renormalised after top-k; ties with the last are all kept."""
    p = np.array([0.1, 0.4, 0.2, 0.3])
    tied = np.array([0.25, 0.25, 0.3, 0.2])
    cases = [
        (p, 0, 1.0, [1, 1, 1, 1]),
        (p, 2, 1.0, [0, 1, 0, 1]),
        (p, 4, 1.0, [1, 1, 1, 1]),
        (p, 9, 1.0, [1, 1, 1, 1]),
        (p, 0, 0.35, [0, 1, 0, 0]),
        (p, 0, 0.45, [0, 1, 0, 1]),
        (p, 0, 0.75, [0, 1, 1, 1]),
        (p, 0, 0.95, [1, 1, 1, 1]),
        (p, 3, 0.43, [0, 1, 0, 0]),  # .4 / .9 = .444
        (p, 2, 0.56, [0, 1, 0, 0]),  # .4 / .7 = .571
        (p, 2, 0.99, [0, 1, 0, 1]),
        (tied, 2, 1.0, [1, 1, 1, 0]),
        (tied, 0, 0.4, [1, 1, 1, 0]),
        (tied, 1, 0.4, [0, 0, 1, 0]),
    ]
    for dtype in (jnp.float32, jnp.float64):
        ours = kept(
            jnp.asarray(np.log([c[0] for c in cases]), dtype),
            jnp.asarray([c[1] for c in cases], jnp.int32),
            jnp.asarray([c[2] for c in cases], jnp.float32),
        )
        np.testing.assert_array_equal(ours, np.array([c[3] for c in cases], bool))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_filters_tell_neighbouring_floats_apart(dtype):
    """The bisections go down to the last bit, on both sides of 0 and of a power of two."""
    high = np.array([1e-20, -1e-20, 1, 1.5, 3, 7e7, -1, -1.5, -2.7, -8e8], dtype)
    x = np.stack([np.nextafter(high, dtype(-np.inf)), high, high - abs(high)], axis=1)
    rows, one = len(high), jnp.ones(len(high), jnp.float32)
    ours = kept(jnp.asarray(x), jnp.ones(rows, jnp.int32), one)
    np.testing.assert_array_equal(ours, x == high[:, None])
    # In the first two rows both neighbours weigh exactly 1: the likelier just reaches a half.
    ours = kept(jnp.asarray(x[:, :2]), jnp.zeros(rows, jnp.int32), 0.5 * one)
    np.testing.assert_array_equal(ours[:2], [[False, True]] * 2)


# --- draws ------------------------------------------------------------------------------------


def arrays(temperature, top_k, top_p, rows):
    return (
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, top_p, jnp.float32),
    )


def draw_longhand(logits, g, temperature, top_k, top_p):
    scaled = logits / (temperature if temperature > 0 else 1.0)
    inside = kept_longhand(scaled, top_k, top_p)
    g = g if temperature > 0 else np.zeros_like(scaled)
    token = int(np.argmax(np.where(inside, scaled + g, -np.inf)))
    total = np.exp(scaled - scaled.max()).sum()
    mass = np.log(np.exp(scaled - scaled.max())[inside].sum() / total)
    return token, scaled[token] - scaled.max() - np.log(total), mass


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab", [9, 300])
def test_rows_with_different_settings_share_a_batch(vocab, dtype):
    """D11: token, unfiltered log-prob at T and kept mass of every row as if it were alone."""
    rng = np.random.default_rng(vocab)
    n = 120
    x = rng.normal(size=(n, vocab)).astype(dtype) * 2
    g = noise(row_keys(0, 0, np.arange(n), np.zeros(n)), np.zeros(n), np.arange(vocab))
    t = rng.choice([0.0, 0.7, 1.0, 1.5], n).astype(np.float32)
    k = rng.choice([0, 1, 3, vocab], n).astype(np.int32)
    p = rng.choice([0.3123457, 0.8765432, 1.0], n).astype(np.float32)
    token, logp, mass = draw(*(jnp.asarray(v) for v in (x, g, t, k, p)))
    assert token.dtype == jnp.int32 and logp.dtype == mass.dtype == jnp.float32
    for i in range(n):
        row = draw_longhand(x[i].astype(np.float64), g[i], float(t[i]), int(k[i]), float(p[i]))
        assert int(token[i]) == row[0]
        np.testing.assert_allclose((logp[i], mass[i]), row[1:], rtol=1e-5, atol=2e-6)
        if k[i] in (0, vocab) and p[i] == 1:
            assert abs(float(mass[i])) < 1e-6
    some = [3, 77]
    alone = draw(*(jnp.asarray(v[some]) for v in (x, g, t, k, p)))
    np.testing.assert_array_equal(alone[0], token[np.array(some)])


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (3, 1.0), (0, 0.8765432)])
def test_temperature_zero_is_greedy_whatever_the_noise(top_k, top_p):
    """C7: divisor 1, so the log-prob is that of the plain softmax; the first of tied ids."""
    x = np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32)
    x[:, [7, 30]] = 9.0
    bad = jnp.full((20, 50), jnp.nan, jnp.float32)
    token, logp, _ = draw(jnp.asarray(x), bad, *arrays(0.0, top_k, top_p, 20))
    np.testing.assert_array_equal(token, np.full(20, 7))
    np.testing.assert_allclose(logp, scipy.special.log_softmax(x, -1)[:, 7], rtol=1e-5)


def test_without_filters_the_log_mass_is_exactly_zero():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 300)), jnp.float32)
    for top_k in (0, -1):
        _, _, mass = draw(x, jnp.zeros_like(x), *arrays(0.7, top_k, 1.0, 8))
        np.testing.assert_array_equal(mass, np.zeros(8))


def test_one_filtered_row_switches_the_filters_on_for_itself_alone():
    x = jnp.broadcast_to(jnp.log(jnp.asarray([0.1, 0.2, 0.3, 0.4], jnp.float32)), (3, 4))
    g = jnp.zeros_like(x).at[:, 0].set(20.0)  # the noise wants the least likely
    one, wide = jnp.ones(3, jnp.float32), jnp.zeros(3, jnp.int32)
    token, _, mass = draw(x, g, one, wide.at[1].set(2), one)
    np.testing.assert_array_equal(token, [0, 3, 0])
    np.testing.assert_allclose(mass, [0, np.log(0.7), 0], atol=1e-6)
    token, _, mass = draw(x, g, one, wide, one.at[2].set(0.5))
    np.testing.assert_array_equal(token, [0, 0, 3])
    np.testing.assert_allclose(mass, [0, 0, np.log(0.7)], atol=1e-6)


@functools.cache
def many(vocab, along):
    """Noise of 100,000 places: of one row's positions, or of many rows' first."""
    n = 100_000
    if along == "positions":
        return noise(np.broadcast_to(row_keys(1, 0, [5], [3]), (n, 2)), np.arange(n), range(vocab))
    return noise(row_keys(1, 0, np.zeros(n), np.arange(n)), np.zeros(n), range(vocab))


@pytest.mark.parametrize("along", ["positions", "samples"])
@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8), (0.7, 4, 0.9)],
)
def test_draws_follow_the_filtered_softmax_at_the_temperature(along, temperature, top_k, top_p):
    """D8, D11: chi-square of 100,000 draws; what the filters drop is never drawn."""
    logits = np.log([0.02, 0.3, 0.08, 0.25, 0.05, 0.3]) + 1.0
    g = many(6, along)
    n = len(g)
    x = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, 6))
    token, _, _ = draw(x, jnp.asarray(g), *arrays(temperature, top_k, top_p, n))
    scaled = logits / temperature
    inside = kept_longhand(scaled, top_k, top_p)
    expected = np.where(inside, np.exp(scaled), 0)
    expected *= n / expected.sum()
    seen = np.bincount(token, minlength=6)
    assert (seen[~inside] == 0).all()
    chi = ((seen - expected)[inside] ** 2 / expected[inside]).sum()
    assert chi < scipy.stats.chi2.isf(1e-3, inside.sum() - 1)


def test_draws_over_several_blocks_follow_the_softmax():
    """D8: the blocked maximum over 300 ids draws from the same distribution."""
    n, vocab = 20_000, 300
    logits = np.random.default_rng(2).normal(size=vocab)
    g = noise(row_keys(2, 0, np.zeros(n), np.arange(n)), np.zeros(n), np.arange(vocab))
    x = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, vocab))
    token, _, _ = draw(x, jnp.asarray(g), *arrays(0.7, 0, 1.0, n))
    expected = scipy.special.softmax(logits / 0.7) * n
    seen = np.bincount(token, minlength=vocab)
    rare = expected < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    chi = ((seen - expected) ** 2 / expected).sum()
    assert chi < scipy.stats.chi2.isf(1e-3, len(seen) - 1)
