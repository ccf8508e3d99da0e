"""One thread that waits for many descriptors and times: the harness never sleeps and never misses a death."""

import heapq
import itertools
import selectors
import time
from collections.abc import Callable
from typing import Protocol

_LOOK_AGAIN_S = 0.01


class HasDescriptor(Protocol):
    """What can be waited for."""

    def fileno(self) -> int: ...


class Reactor:
    """Calls back when a descriptor is readable or a time has come."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def watch(self, source: int | HasDescriptor, ready: Callable[[], None]) -> None:
        """Calls `ready` whenever `source` is readable."""
        self._selector.register(source, selectors.EVENT_READ, ready)

    def forget(self, source: int | HasDescriptor) -> None:
        """Ends a watch, before its descriptor is closed."""
        self._selector.unregister(source)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Calls `action` once, so much later."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), action))

    def run_for(self, duration_s: float) -> None:
        """Serves for so long."""
        self.run_until(lambda: False, duration_s)

    def run_until(self, reached: Callable[[], bool], deadline_s: float) -> bool:
        """Serves until a condition holds, which is looked at every 10 ms; returns whether it does in time."""
        end = time.monotonic() + deadline_s
        while not reached():
            left_s = end - time.monotonic()
            if left_s <= 0:
                return False
            self._serve_once(min(left_s, _LOOK_AGAIN_S))
        return True

    def _serve_once(self, most_s: float) -> None:
        if self._timers:
            most_s = min(most_s, self._timers[0][0] - time.monotonic())
        for key, _ in self._selector.select(max(most_s, 0.0)):
            # One callback may have ended the watch of another that is ready too, and begun one of the same number.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
