"""Allocates that wait for blocks which another session is computing: they sleep until the pool has something to say."""

import asyncio
from collections import deque
from dataclasses import dataclass

from kvharbor.pool import Awaited, Outlook
from kvharbor.server.errors import ServerError
from kvharbor.server.scheduling.applications import Patience
from kvharbor.server.scheduling.owner import PoolOwner


@dataclass(slots=True, eq=False)
class _Waiter:
    applicant: object
    asleep: "asyncio.Future[None] | None" = None
    refused: ServerError | None = None
    is_over: bool = False

    def wake(self) -> bool:
        """Returns whether it was asleep."""
        if self.asleep is None or self.asleep.done():
            return False
        self.asleep.set_result(None)
        return True

    def time_is_over(self) -> None:
        """Ends the wait."""
        self.is_over = True
        self.wake()


class SingleFlight:
    """Waits of one pool. A waiter holds neither blocks nor a turn [S30].

    It is woken when the pool says so, and when its writer may have stalled. Those who are woken at once come in the
    order in which they began to wait, each in a step of its own: the first of them that takes over is what the others
    then wait for.
    """

    def __init__(self, owner: PoolOwner) -> None:
        self._owner = owner
        self._waiters: dict[Awaited, _Waiter] = {}
        self._woken: deque[Awaited] = deque()
        self._is_waking = False
        owner.listeners.append(self._wake_moved)

    @property
    def waiting_count(self) -> int:
        """Allocates that wait."""
        return len(self._waiters)

    async def wait(self, applicant: object, awaited: Awaited, wait_s: float, patience: Patience) -> None:
        """Returns when it is no use to wait any longer, at the latest after `wait_s` or with the `patience`."""
        owner = self._owner
        deadline = owner.clock() + wait_s
        waiter = self._waiters[awaited] = _Waiter(applicant)
        try:
            patience.begin(waiter.time_is_over)
            while await self._sleep(waiter, awaited, deadline):
                if owner.call(lambda: owner.pool.look_again(awaited)) is not Outlook.PENDING:
                    return
        finally:
            del self._waiters[awaited]
            owner.call(lambda: owner.pool.stop_waiting(awaited))

    def give_up(self, applicant: object, reason: ServerError) -> None:
        """Ends the waits of one applicant with `reason`."""
        for waiter in self._waiters.values():
            if waiter.applicant is applicant:
                waiter.refused = reason
                waiter.wake()

    def give_up_all(self, reason: ServerError) -> None:
        """Ends all waits with `reason`."""
        for waiter in self._waiters.values():
            waiter.refused = reason
            waiter.wake()

    async def _sleep(self, waiter: _Waiter, awaited: Awaited, deadline: float) -> bool:
        """Sleeps until it is time to look again; returns False when the time is over."""
        loop, now = asyncio.get_running_loop(), self._owner.clock()
        if now >= deadline or waiter.is_over:
            return False
        if not awaited.moved:  # it may have been, between the slice that began the wait and this one
            waiter.asleep = loop.create_future()
            stall = loop.call_later(awaited.stalls_at - now, self._wake, awaited)
            try:
                async with asyncio.timeout(deadline - now):
                    await waiter.asleep
            except TimeoutError:
                return False
            finally:
                stall.cancel()
        if waiter.refused is not None:
            raise waiter.refused
        return not waiter.is_over

    def _wake_moved(self) -> None:
        for awaited in self._owner.pool.drain_moved():
            self._wake(awaited)

    def _wake(self, awaited: Awaited) -> None:
        self._woken.append(awaited)
        if not self._is_waking:
            self._is_waking = True
            self._owner.spawn(self._wake_all())

    async def _wake_all(self) -> None:
        """Wakes one waiter after the other, and lets others run in between."""
        while self._woken:
            waiter = self._waiters.get(self._woken.popleft())
            if waiter is not None and waiter.wake():
                await asyncio.sleep(0)
        self._is_waking = False
