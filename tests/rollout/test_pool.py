import functools

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax.rollout import pool as pool_lib


def counted():
    """Make a jitted function of (power: static, x, tree) that counts how often it is traced."""
    traces = []

    @functools.partial(jax.jit, static_argnums=1)
    def function(x, power, extra):
        traces.append(power)
        return x**power + (0.0 if extra is None else extra)

    return function, traces


def test_a_key_is_compiled_once_and_run_often():
    """D22, F12: no second trace, and the arguments are those of each call."""
    function, traces = counted()
    pool = pool_lib.Pool(frozenset({"square", "cube"}))
    for x in (2.0, 3.0, 5.0):
        for key, power in (("square", 2), ("cube", 3)):
            out = pool_lib.call(pool, key, function, {1: power}, jnp.float32(x), jnp.float32(1.0))
            assert float(out) == x**power + 1
    assert sorted(traces) == [2, 3]
    assert pool_lib.describe(pool)["compile/count"] == 2
    assert pool_lib.describe(pool)["compile/unexpected"] == 0


def test_a_key_that_was_not_listed_is_counted_and_told_before_it_is_compiled():
    """D22: once for each compilation, not for each call."""
    function, traces = counted()
    told = []
    pool = pool_lib.Pool(
        frozenset({"listed"}), on_compile=lambda key: told.append((key, len(traces)))
    )
    for key in ("listed", "surprise", "surprise", "listed", "other"):
        pool_lib.call(pool, key, function, {1: 1}, jnp.float32(1.0), None)
    assert [key for key, _ in told] == ["listed", "surprise", "other"]
    assert told[0] == ("listed", 0)
    assert pool.unexpected == 2
    assert pool_lib.describe(pool)["compile/unexpected"] == 2


def test_arguments_of_another_structure_get_a_program_of_their_own():
    """With and without a drafter: None is structure, not a value."""
    function, _ = counted()
    pool = pool_lib.Pool()
    x = jnp.float32(3.0)
    assert float(pool_lib.call(pool, "k", function, {1: 1}, x, None)) == 3
    assert float(pool_lib.call(pool, "k", function, {1: 1}, x, jnp.float32(4.0))) == 7
    assert float(pool_lib.call(pool, "k", function, {1: 1}, x, None)) == 3
    assert pool_lib.describe(pool)["compile/count"] == 2


def test_static_arguments_go_to_their_places_among_the_traced():
    function = jax.jit(
        lambda first, a, b, last, c: jnp.stack([a * first, b * last, c]), static_argnums=(0, 3)
    )
    pool = pool_lib.Pool()
    out = pool_lib.call(pool, "k", function, {0: 2, 3: 10}, *map(jnp.float32, (1.0, 3.0, 7.0)))
    np.testing.assert_array_equal(out, [2, 30, 7])


def test_the_pool_reports_its_cost():
    function, _ = counted()
    pool = pool_lib.Pool()
    empty = pool_lib.describe(pool)
    assert set(empty.values()) == {0}
    pool_lib.call(pool, "k", function, {1: 5}, jnp.float32(1.0), None)
    after = pool_lib.describe(pool)
    assert after["compile/seconds"] > 0 and after["compile/pool_bytes"] >= 0
    assert set(after) == {
        "compile/count",
        "compile/unexpected",
        "compile/pool_bytes",
        "compile/seconds",
    }


def test_the_pool_counts_the_buffers_of_every_program():
    """F12: two products in a row need one buffer for the first."""
    function = jax.jit(lambda x: x @ x @ x)
    pool = pool_lib.Pool()
    for n in (1, 2):
        for _ in range(2):
            pool_lib.call(pool, n, function, {}, jnp.ones((64 * n, 64 * n), jnp.float32))
    assert pool_lib.describe(pool)["compile/pool_bytes"] >= 4 * (64**2 + 128**2)


def test_pools_share_nothing():
    one, two = pool_lib.Pool(), pool_lib.Pool()
    function, _ = counted()
    pool_lib.call(one, "k", function, {1: 1}, jnp.float32(1.0), None)
    assert len(one.programs) == 1 and not two.programs


def test_the_least_recently_used_program_gives_way():
    function, traces = counted()
    pool = pool_lib.Pool(limit=2)

    def run(power):
        pool_lib.call(pool, power, function, {1: power}, jnp.float32(1.0), None)

    for power in (1, 2, 1, 3, 1, 2):  # 3 takes the place of 2, then 2 that of 3
        run(power)
    assert traces == [1, 2, 3] and [key for key, _ in pool.programs] == [1, 2]
    assert pool_lib.describe(pool)["compile/count"] == 4  # JAX itself knew the last from before


def test_what_was_warmed_up_is_not_compiled_again():
    """Shapes are enough; what is there already is left alone."""
    function, traces = counted()
    pool = pool_lib.Pool(frozenset({1, 2, 3}))
    pool_lib.call(pool, 1, function, {1: 1}, jnp.float32(1.0), None)
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    jobs = [pool_lib.Job(p, function, {1: p}, (shape, None)) for p in (1, 2, 3)]
    pool_lib.warm_up(pool, jobs, threads=2)
    assert sorted(traces) == [1, 2, 3] and pool.compiled == 3 and pool.unexpected == 0
    assert float(pool_lib.call(pool, 3, function, {1: 3}, jnp.float32(2.0), None)) == 8
    assert pool.compiled == 3
