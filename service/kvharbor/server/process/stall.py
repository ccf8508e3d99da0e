"""The service's clock: it stands still while the process does not run, so that nobody's wait ends by it."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

TICK_S: Final = 0.1
MOST_LATE_S: Final = 0.25


class ServiceLoop(asyncio.SelectorEventLoop):
    """An event loop whose time leaves out stalls: every timer, timeout and deadline on it is put off by them [S21].

    A tick is due every TICK_S. When one is late by more than MOST_LATE_S, the process was stopped, starved or busy
    with one step, and the time by which it is late has not passed for anybody. `time()` never goes back, and goes on
    over processes with the `stalled_s` of the one before.
    """

    def __init__(self, stalled_s: float = 0.0) -> None:
        self.stalled_s = stalled_s
        self._tick_due_at = float("inf")
        self._told = float("-inf")
        self._unreported_s = 0.0
        super().__init__()

    def time(self) -> float:
        """Returns seconds of CLOCK_MONOTONIC less all stalls."""
        now = time.monotonic() - self.stalled_s
        if now - self._tick_due_at > MOST_LATE_S:
            # What somebody was told of it, while the tick was only a little late, has passed.
            late_s = now - max(self._tick_due_at, self._told)
            self.stalled_s += late_s
            self._unreported_s += late_s
            now -= late_s
        self._told = now
        return now

    def tick(self, ticked: Callable[[float, float], None]) -> None:
        """Starts to tick, until the loop closes. `ticked` gets how late each tick was and the stalls since the last.

        Both in seconds; a stall counts for both.
        """
        now = self.time()
        stalled_s, self._unreported_s = self._unreported_s, 0.0
        if self._tick_due_at < now + TICK_S:
            ticked(now - self._tick_due_at + stalled_s, stalled_s)
        self._tick_due_at = now + TICK_S
        self.call_at(self._tick_due_at, self.tick, ticked)
