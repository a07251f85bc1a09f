"""The pool of compiled programs: what was compiled, what was expected, how many bytes.

Programs are compiled ahead of time at first use and kept under an explicit key, so that
nothing is ever retraced behind one's back and a compilation that was not on the list shows.
"""

import dataclasses
import time
from collections.abc import Callable, Hashable

import jax


@dataclasses.dataclass
class Pool:
    """Executables by key. `expected` are the keys listed at start."""

    expected: frozenset[Hashable] = frozenset()
    programs: dict[Hashable, Callable] = dataclasses.field(default_factory=dict)
    unexpected: int = 0
    seconds: float = 0.0
    bytes: int = 0
    on_compile: Callable[[Hashable], None] = lambda key: None


def call(pool: Pool, key: Hashable, function, static: dict[int, object], *args):
    """Run a jitted function through the pool.

    `static` holds the static arguments by their place; `args` are the traced ones in order,
    and their shapes must follow from the key. Their structure (a drafter or none) may vary.
    """
    full = (key, jax.tree.structure(args))
    if full not in pool.programs:
        pool.programs[full] = _compile(pool, key, function, static, args)
    return pool.programs[full](*args)


def _compile(pool, key, function, static, args):
    pool.on_compile(key)
    began = time.perf_counter()
    merged, rest = [], list(args)
    for i in range(len(static) + len(args)):
        merged.append(static[i] if i in static else rest.pop(0))
    program = function.lower(*merged).compile()
    pool.seconds += time.perf_counter() - began
    pool.unexpected += key not in pool.expected
    pool.bytes += _held_bytes(program)
    return program


def _held_bytes(program) -> int:
    """Size a program's code and temporary buffers, as the compiler reports them.

    The CPU backend reports no code size, so there it is the buffers alone.
    """
    stats = program.memory_analysis()
    return stats.generated_code_size_in_bytes + stats.temp_size_in_bytes


def describe(pool: Pool) -> dict[str, float]:
    """Report the pool's metrics."""
    return {
        "compile/count": float(len(pool.programs)),
        "compile/unexpected": float(pool.unexpected),
        "compile/pool_bytes": float(pool.bytes),
        "compile/seconds": pool.seconds,
    }
