"""Shared by all tests: shapes are checked at run time, and the compilation cache is shared."""

import gc
import os
import pathlib
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax
import jaxtyping
import pytest

jaxtyping.install_import_hook("fastgrpo_jax", "beartype.beartype")
jax.config.update("jax_enable_x64", True)  # the lossless law is exact in float64
_cache = os.environ.get(
    "FASTGRPO_TEST_CACHE", os.path.join(tempfile.gettempdir(), f"fastgrpo-test-cache-{os.getuid()}")
)
jax.config.update("jax_compilation_cache_dir", _cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


_MAPPINGS = pathlib.Path("/proc/self/maps")
_MANY = 20_000


@pytest.fixture(scope="module", autouse=True)
def few_mappings():
    """Let go of programs now and then: each takes memory mappings, of which Linux gives a process
    65,530, and XLA aborts where it gets none."""
    yield
    if _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > _MANY:
        jax.clear_caches()
        gc.collect()
