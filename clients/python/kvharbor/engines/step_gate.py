"""Between steps and whoever has to know that none is under way."""

import contextlib
import threading
from collections.abc import Iterator


class StepGate:
    """Steps of one thread, and other threads that wait for the end of the one under way.

    A plain lock would do but for its unfairness: a thread that takes it again at once lets nobody in.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stepping = False
        self._waiting = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Runs the block as a step, after those who wait."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._stepping = True
        try:
            yield
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    def wait_for_end(self) -> None:
        """Returns when no step is under way; those that come wait meanwhile."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._stepping)
            finally:
                self._waiting -= 1
                self._changed.notify_all()
