"""Several processes that run one training: how they meet, agree, and end when one is lost.

All processes run the same programs in the same order, over one mesh of all their devices; so
whatever decides what runs next must be the same on each. It is computed alike from what is alike
(config, data, tokens), or one process's own is told to the others (clocks, files, signals). With
one process every function here gives back what it was given.
"""

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from fastgrpo_jax import base

T = TypeVar("T")


class Address(NamedTuple):
    """Where processes meet: process 0's address, their number and this one's; "auto": by cluster."""

    coordinator: str
    count: int
    index: int

    def __str__(self):
        return f"process {self.index} of {self.count}" if self.count else "this process"


def address(coordinator: str, count: int, index: int) -> Address | None:
    """Take `hosts.*` of a config, or what the environment says where it is silent; None: alone.

    The variables are JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. With "auto"
    JAX asks the cluster: a TPU pod, Slurm, Open MPI, Kubernetes.

    Raises:
      UserError: a number is missing or out of range.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    if not coordinator:
        if count > 1:
            raise base.UserError(
                f"hosts.count is {count}, but hosts.coordinator is empty; allowed: HOST:PORT of "
                "process 0, or auto on a cluster that JAX knows"
            )
        return None
    if coordinator == "auto":
        return Address(coordinator, 0, -1)
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise base.UserError(
            f"hosts.coordinator is {coordinator!r}; allowed: HOST:PORT of process 0, auto, or empty"
        )
    count = count or _number("JAX_NUM_PROCESSES", 0)
    index = index if index >= 0 else _number("JAX_PROCESS_ID", -1)
    if count < 1:
        raise base.UserError(
            f"hosts.count is {count}; allowed: the number of processes, 1 or more, here or in "
            "JAX_NUM_PROCESSES"
        )
    if not 0 <= index < count:
        raise base.UserError(
            f"hosts.index is {index}; allowed: 0 to {count - 1}, each once, here or in JAX_PROCESS_ID"
        )
    return Address(coordinator, count, index) if count > 1 else None


def _number(name: str, missing: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise base.UserError(f"{name} is {text!r} in the environment; allowed: a number")
    return int(text or missing)


def join(where: Address | None, timeout_s: int) -> None:
    """Meet the other processes, before JAX is used for anything; `timeout_s` is how long they are
    waited for, and how long one may be silent before the others end.

    Raises:
      UserError: if they do not come.
    """
    if where is None:
        return
    if timeout_s < 1:
        raise base.UserError(f"hosts.timeout_s is {timeout_s}; allowed: 1 or more")
    known = {"cluster_detection_method": "deactivate"}
    known |= dict(coordinator_address=where.coordinator, num_processes=where.count)
    known |= dict(process_id=where.index)
    try:
        jax.distributed.initialize(
            **(known if where.coordinator != "auto" else {}),
            initialization_timeout=timeout_s,
            heartbeat_timeout_seconds=timeout_s,
            shutdown_timeout_seconds=timeout_s,
        )
    except (ValueError, RuntimeError) as error:
        line = str(error).strip().partition("\n")[0]
        if where.coordinator == "auto" and "should be defined" in line:
            raise base.UserError(
                "hosts.coordinator is 'auto', but no cluster that JAX knows was found here; "
                "allowed: HOST:PORT of process 0, with hosts.count and hosts.index"
            ) from error
        raise base.UserError(
            f"hosts.coordinator is {where.coordinator!r}: the processes did not meet within "
            f"{timeout_s} s ({line[:300]})"
        ) from error


def count() -> int:
    """Count the processes of the run."""
    return jax.process_count()


def first() -> bool:
    """Say whether this process is the one that writes files and speaks."""
    return jax.process_index() == 0


def exchange(value: T) -> list[T]:
    """Tell all processes a value, anything that pickles; returns everyone's, by process."""
    if count() == 1:
        return [value]
    mine = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(len(mine))))
    room = 1 << max(int(sizes.max()) - 1, 1023).bit_length()  # few shapes: each is a program
    sent = np.zeros(room, np.uint8)
    sent[: len(mine)] = mine
    everyone = np.asarray(multihost_utils.process_allgather(sent)).reshape(-1, room)
    return [pickle.loads(x[:size].tobytes()) for x, size in zip(everyone, sizes)]


def together(work: Callable[[], T]) -> T:
    """Do work on every process; what one of them refuses, all refuse.

    Raises:
      UserError: the first process's that raised one.
    """
    if count() == 1:
        return work()
    done, refusal = None, None
    try:
        done = work()
    except base.UserError as error:
        refusal = str(error)
    said = exchange(refusal)
    for i, text in enumerate(said):
        if text is not None:
            alone = "" if said.count(text) == len(said) else f"process {i} of {len(said)}: "
            raise base.UserError(alone + text)
    return done


def from_first(work: Callable[[], T]) -> T:
    """Do work on the first process and tell its result to all.

    Raises:
      UserError: if it raised one.
    """
    return exchange(together(lambda: work() if first() else None))[0]


def same(name: str, value: Any) -> None:
    """Check that all processes have an equal value, by its text.

    Raises:
      UserError: naming those that differ from process 0.
    """
    said = exchange(hashlib.sha256(repr(value).encode()).hexdigest())
    differ = [str(i) for i, x in enumerate(said) if x != said[0]]
    if differ:
        raise base.UserError(
            f"{name} differs between the processes of this run: {', '.join(differ)} from 0"
        )


def share(items: Sequence[T]) -> Sequence[T]:
    """Take this process's part of some items: following ones, about as many for each."""
    n, i = count(), jax.process_index()
    return items[len(items) * i // n : len(items) * (i + 1) // n]
