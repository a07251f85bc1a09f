"""Ctrl-C and SIGTERM: noted while a step runs, acted on where nothing is lost."""

import os
import signal


class Interrupted(Exception):
    """Ctrl-C or SIGTERM arrived; steps that were finished are saved."""


class Signals:
    """Notes Ctrl-C and SIGTERM while it is entered; a second one acts at once, as usual."""

    def __init__(self):
        self.caught = None
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

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.caught is not None:
            raise Interrupted(self.caught.name)
