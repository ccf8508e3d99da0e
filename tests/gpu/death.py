"""How a process's death looks from outside: its socket's end, its pidfd, and the last store of what it left running."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu.actor import Actor, ready
from waiting import until

QUIET_NS = 500_000_000
"""So long nothing is stored any more before a watch ends."""
_CALIBRATIONS = 200


@dataclass(frozen=True, slots=True)
class DeathTimes:
    """When each was seen, in milliseconds after the SIGKILL."""

    socket_end_ms: float
    pidfd_ms: float
    last_store_ms: float
    pidfd_doubt_ms: float
    """How much earlier the pidfd may have been readable: the time since the look before."""

    @property
    def late_stores_ms(self) -> float:
        """How much later than the pidfd the last store was: negative if earlier."""
        return self.last_store_ms - self.pidfd_ms


def kill_and_watch(victim: Actor, read_slots: Callable[[], Sequence[int]]) -> DeathTimes:
    """Kills a process that stores times into slots, and watches until all is quiet: as often as it can."""
    until(lambda: max(read_slots()), bool)
    offset_ns = _clock_offset_ns(read_slots)
    pidfd = os.pidfd_open(victim.process.pid)
    try:
        return _watched(victim, pidfd, lambda: max(read_slots()) + offset_ns)
    finally:
        os.close(pidfd)
        victim.process.wait(30)


def _clock_offset_ns(read_slots: Callable[[], Sequence[int]]) -> int:
    """What to add to a stored time for this process's clock: too much by what the quickest look took."""
    # What was read was stored before: the difference of the clocks is less than each of these.
    return min(-max(read_slots()) + time.monotonic_ns() for _ in range(_CALIBRATIONS))


def _watched(victim: Actor, pidfd: int, last_store_ns: Callable[[], int]) -> DeathTimes:
    seen_ns: dict[int, int] = {}
    looked_ns = {}
    killed_ns = time.monotonic_ns()
    os.kill(victim.process.pid, signal.SIGKILL)
    stored_ns = last_store_ns()
    while len(seen_ns) < 2 or time.monotonic_ns() - max(stored_ns, *seen_ns.values()) < QUIET_NS:
        for fd in {victim.channel_fd, pidfd} - seen_ns.keys():
            before_ns = time.monotonic_ns()
            if ready(fd):
                seen_ns[fd] = time.monotonic_ns()
            else:
                looked_ns[fd] = before_ns
        stored_ns = last_store_ns()
    return DeathTimes(
        socket_end_ms=(seen_ns[victim.channel_fd] - killed_ns) / 1e6,
        pidfd_ms=(seen_ns[pidfd] - killed_ns) / 1e6,
        last_store_ms=(stored_ns - killed_ns) / 1e6,
        pidfd_doubt_ms=(seen_ns[pidfd] - looked_ns.get(pidfd, killed_ns)) / 1e6,
    )
