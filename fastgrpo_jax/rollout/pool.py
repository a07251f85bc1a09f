"""The pool of compiled programs: what was compiled, what was expected, how many bytes.

Programs are compiled ahead of time at first use and kept under an explicit key, so that
nothing is ever retraced behind one's back and a compilation that was not on the list shows.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax


@dataclasses.dataclass
class Pool:
    """Executables by key, the least recently used first.

    Attributes:
      expected: the keys listed at start.
      limit: most programs kept; the least recently used ones give way.
      compiled: programs compiled so far, those that gave way included.
    """

    expected: frozenset[Hashable] = frozenset()
    limit: int = 256
    programs: dict[Hashable, Callable] = dataclasses.field(default_factory=dict)
    compiled: int = 0
    unexpected: int = 0
    seconds: float = 0.0
    on_compile: Callable[[Hashable], None] = lambda key: None

    @property
    def bytes(self) -> int:
        """Bytes that the kept programs hold."""
        return sum(map(held_bytes, self.programs.values()))


class Job(NamedTuple):
    """A program to compile: its key, function, static arguments by place, and traced ones."""

    key: Hashable
    function: Any
    static: dict[int, object]
    args: tuple


def call(pool: Pool, key: Hashable, function, static: dict[int, object], *args):
    """Run a jitted function through the pool.

    `static` holds the static arguments by their place; `args` are the traced ones in order,
    and their shapes must follow from the key. Their structure (a drafter or none) may vary.
    """
    full = (key, jax.tree.structure(args))
    if full in pool.programs:
        program = pool.programs[full] = pool.programs.pop(full)  # the latest used is the last
        return program(*args)
    pool.on_compile(key)
    began = time.perf_counter()
    program = _compile(Job(key, function, static, args))
    pool.seconds += time.perf_counter() - began
    _keep(pool, key, full, program)
    return program(*args)


def warm_up(pool: Pool, jobs: Sequence[Job], threads: int) -> None:
    """Compile what the pool lacks, several at a time; arguments may be shapes alone."""
    lacking = [j for j in jobs if (j.key, jax.tree.structure(j.args)) not in pool.programs]
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(max(threads, 1)) as executor:
        for job, program in zip(lacking, executor.map(_compile, lacking)):
            pool.on_compile(job.key)
            _keep(pool, job.key, (job.key, jax.tree.structure(job.args)), program)
    pool.seconds += time.perf_counter() - began


def _compile(job: Job):
    merged, rest = [], list(job.args)
    for i in range(len(job.static) + len(job.args)):
        merged.append(job.static[i] if i in job.static else rest.pop(0))
    return job.function.lower(*merged).compile()


def _keep(pool: Pool, key, full, program) -> None:
    pool.compiled += 1
    pool.unexpected += key not in pool.expected
    pool.programs[full] = program
    while len(pool.programs) > pool.limit:
        del pool.programs[next(iter(pool.programs))]


def held_bytes(program) -> int:
    """Size a program's code and temporary buffers, as the compiler reports them.

    The CPU backend reports no code size, so there it is the buffers alone.
    """
    stats = program.memory_analysis()
    return stats.generated_code_size_in_bytes + stats.temp_size_in_bytes


def describe(pool: Pool) -> dict[str, float]:
    """Report the pool's metrics."""
    return {
        "compile/count": float(pool.compiled),
        "compile/unexpected": float(pool.unexpected),
        "compile/pool_bytes": float(pool.bytes),
        "compile/seconds": pool.seconds,
    }
