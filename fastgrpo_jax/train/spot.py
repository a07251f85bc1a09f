"""The spot trainer: the drafter learns on devices that the last rows of a rollout leave idle.

Once few rows are left they move to a part of the mesh (`rollout.generate`), and on the other
devices a thread updates the drafter on sequences of earlier steps (`replay`), one update after
another, until the rollout ends (TLT, arXiv 2511.16665). The rollout itself goes on with the
drafter that it began with. How many updates fit is a matter of clocks: they change the drafter,
which never changes a token.
"""

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base, sharding
from fastgrpo_jax.train import drafter, replay, step


class Given(NamedTuple):
    """What a rollout hands to the trainer before it begins."""

    policy: base.Params  # in the rollout's layout and dtype
    head: Any  # of the draft vocabulary; None for the policy's own
    state: drafter.State  # in the layout of training
    buffer: replay.Buffer
    rng: np.random.Generator


class Learned(NamedTuple):
    """What came of a rollout's idle devices.

    state: the drafter, back in the layout of training on the whole mesh; None without an update.
    idle_seconds, busy_seconds: of a device, times the number of idle devices.
    gained: acceptance of sequences that no update saw, after less before; NaN without an update.
    """

    state: drafter.State | None
    updates: int
    loss: float
    idle_seconds: float
    busy_seconds: float
    gained: float


NOTHING = Learned(None, 0, float("nan"), 0.0, 0.0, float("nan"))


def total(rollouts: Sequence[Learned]) -> Learned:
    """Join what was learned in rollouts that followed one another, each from where the last ended."""
    taught = [x for x in rollouts if x.updates] or [NOTHING]
    return taught[-1]._replace(
        updates=sum(x.updates for x in rollouts),
        idle_seconds=sum(x.idle_seconds for x in rollouts),
        busy_seconds=sum(x.busy_seconds for x in rollouts),
        gained=sum(x.gained for x in taught),
    )


def metrics(learned: Learned) -> dict[str, float]:
    return {
        "spot/updates": float(learned.updates),
        "spot/loss": learned.loss,
        "spot/idle_s": learned.idle_seconds,
        "spot/busy_s": learned.busy_seconds,
        "spot/acceptance_gained": learned.gained,
    }


_HOPE = 0.9  # of what a first update took counts after each tail that was too short for one


class Trainer:
    """Trains on the `idle` part of a mesh, in a thread of its own: prepare, begin, end.

    Until its programs are compiled, which `compile` does beside the first rollouts, idle devices
    stay idle; and where the last tail was over before an update would have been.
    """

    def __init__(self, config: step.StepConfig, idle: Any):
        policy = dataclasses.replace(config.policy, mesh=idle)
        self.config = replay.config_for(dataclasses.replace(config, policy=policy))
        self.idle, self.whole = idle, config.policy.mesh
        self.programs: _Programs | None = None
        self.ended = threading.Event()
        self.given: Given | None = None
        self.thread: threading.Thread | None = None
        self.found, self.began, self.error = NOTHING, 0.0, None
        self.tail_s = float("inf")  # of the last tail
        self.first_s = 0.0  # from a tail's start to the end of its first update

    def compile(self, given: Given) -> threading.Thread:
        """Compile everything in the background, for what is shaped as what is given."""
        shapes = _shapes(self.config, self.idle, given)

        def work() -> None:
            self.programs = _compile(self.config, self.idle, shapes)

        thread = threading.Thread(target=self._guarded(work), daemon=True)
        thread.start()
        return thread

    def prepare(self, given: Given) -> None:
        """Take what the next rollout's idle devices may learn from."""
        self.given, self.found, self.thread, self.began = given, NOTHING, None, 0.0
        self.ended.clear()

    def begin(self) -> None:
        """Start: devices are idle from now on."""
        self.began = time.perf_counter()
        if self.tail_s < self.first_s:
            self.first_s *= _HOPE
        elif self.given.buffer and self.programs:
            self.thread = threading.Thread(target=self._guarded(self._study), daemon=True)
            self.thread.start()

    def end(self) -> Learned:
        """Stop after the update that runs, and give what was learned.

        Raises:
          whatever ended the training.
        """
        idle = 0.0
        if self.began:
            self.tail_s = time.perf_counter() - self.began
            idle = self.tail_s * self.idle.size
        self.stop()
        if self.error:
            raise self.error
        found = self.found
        if found.updates:
            found = found._replace(state=sharding.put_params(self.whole, found.state))
        return found._replace(idle_seconds=idle)

    def stop(self) -> None:
        """Stop after the update that runs."""
        self.ended.set()
        if self.thread:
            self.thread.join()

    def _guarded(self, work):
        def run() -> None:
            try:
                work()
            except BaseException as error:  # told by `end`, in the thread that can do something
                self.error = error

        return run

    def _study(self) -> None:
        given, began, losses = self.given, time.perf_counter(), []
        held, taught = _hold(given.buffer, given.rng)
        if not taught:
            return
        student = _Student(self.config, self.idle, given, self.programs)
        unseen = before = None
        while not self.ended.is_set():
            if unseen is None:
                unseen = student.lesson(held)
            elif before is None:
                before = student.examine(unseen)
            else:
                losses.append(student.update(replay.draw(taught, replay.LESSON, given.rng)))
            if len(losses) < 2:
                self.first_s = time.perf_counter() - began
        self.found = Learned(
            student.state,
            len(losses),
            float(np.mean(losses)) if losses else float("nan"),
            0.0,
            (time.perf_counter() - began) * self.idle.size,
            student.examine(unseen) - before if losses else float("nan"),
        )


def _hold(buffer: replay.Buffer, rng: np.random.Generator) -> tuple[replay.Buffer, replay.Buffer]:
    """Hold a lesson's sequences back from the updates, an eighth of them at most."""
    order = rng.permutation(len(buffer))
    count = min(replay.LESSON, len(buffer) // 8)
    return [buffer[i] for i in order[:count]], [buffer[i] for i in order[count:]]


class _Programs(NamedTuple):
    read: Any
    update: Any
    examine: Any


class _Student:
    """A copy of the drafter on the idle devices."""

    def __init__(self, config: drafter.Config, mesh: Any, given: Given, programs: _Programs):
        self.config, self.mesh, self.programs = config, mesh, programs
        self.policy = sharding.narrow(mesh, given.policy)
        self.frozen = _frozen(self.policy, sharding.narrow(mesh, given.head))
        placed = sharding.put_params(mesh, given.state)
        self.state = jax.tree.map(jnp.copy, placed)  # updates donate it

    def lesson(self, rows: replay.Buffer) -> drafter.Lesson:
        return self.programs.read(self.policy, _batch(self.config, self.mesh, rows))

    def update(self, rows: replay.Buffer) -> float:
        self.state, loss = self.programs.update(self.frozen, self.state, self.lesson(rows))
        return float(loss)

    def examine(self, lesson: drafter.Lesson) -> float:
        """Estimate the acceptance of a first draft."""
        return float(self.programs.examine(self.frozen, self.state.params, lesson)[0])


def _frozen(policy: base.Params, head) -> drafter.Frozen:
    return drafter.freeze(policy) if head is None else drafter.Frozen(policy["embed"], head)


def _batch(config: drafter.Config, mesh: Any, rows: replay.Buffer):
    span = config.frame.max_prompt + config.frame.max_response
    return sharding.put(mesh, replay.lesson(rows, replay.LESSON, span))


def _shapes(config: drafter.Config, mesh: Any, given: Given) -> tuple:
    """Describe what the programs are given: the policy, what is frozen, the drafter, a batch."""
    policy, head = sharding.narrow(mesh, (given.policy, given.head))
    known = sharding.shapes(mesh, (policy, _frozen(policy, head), _batch(config, mesh, [])))
    return known, sharding.shapes(mesh, given.state, sharding.of_params(mesh, given.state))


def _compile(config: drafter.Config, mesh: Any, shapes: tuple) -> _Programs:
    (policy, frozen, batch), state = shapes
    read = drafter.read.lower(config, policy, batch).compile()
    made = jax.eval_shape(lambda *x: drafter.read(config, *x), policy, batch)
    lesson = sharding.shapes(mesh, made, read.output_shardings)
    update = drafter.update.lower(config, frozen, state, lesson).compile()
    examine = drafter.examine.lower(config, frozen, state.params, lesson).compile()
    return _Programs(read, update, examine)
