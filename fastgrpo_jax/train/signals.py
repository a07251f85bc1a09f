"""Ctrl-C and SIGTERM: noted while a step runs, acted on where nothing is lost."""

import os
import signal

from fastgrpo_jax import hosts

_TOLD = 16  # calls of `check` after which several processes tell one another


class Interrupted(Exception):
    """Ctrl-C or SIGTERM arrived; steps that were finished are saved."""


class Signals:
    """Notes Ctrl-C and SIGTERM while it is entered; a second one acts at once, as usual.

    Of several processes any may be told, and all stop at the same place.
    """

    def __init__(self):
        self.caught = None
        self.calls = 0
        self.before = {}

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_):
        self._release()

    def _release(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _catch(self, number, frame):
        self.caught = signal.Signals(number)
        for each in self.before:  # ends even a long compilation
            signal.signal(each, signal.SIG_DFL)
        os.write(2, f"\n{self.caught.name}: saving soon; again to stop at once\n".encode())

    def check(self, now: bool = False) -> None:
        """Raise Interrupted if a signal came; several processes ask one another `now`, or now and
        then."""
        self.calls += 1
        caught = self.caught and self.caught.name
        if hosts.count() > 1:
            told = now or self.calls % _TOLD == 0
            caught = next(filter(None, hosts.exchange(caught)), None) if told else None
        if caught:
            raise Interrupted(caught)
