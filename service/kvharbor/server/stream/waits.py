"""Requests of a stream that are answered later: Allocates that wait, and what Acquires and Leases have to wait for."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from kvharbor.pool.errors import InvalidField
from kvharbor.server.scheduling.applications import Patience

MAX_WAITS: Final = 1024
"""Requests of one stream that may wait at a time."""


class Waits:
    """By the number of its request, each has a task, and is delivered once when that has ended.

    `failed` is called with an error that is no refusal.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._waits: dict[int, tuple[asyncio.Task[Any], Patience, Callable[[asyncio.Task[Any]], None]]] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def check_room(self) -> None:
        """Refuses one more than there may be."""
        if len(self._waits) >= MAX_WAITS:
            raise InvalidField(
                field="wait",
                value=f"set in the {MAX_WAITS + 1}th request that waits",
                limit=f"{MAX_WAITS} requests of a stream that wait at a time",
                remedy="wait for some of them, or cancel them",
            )

    def add(
        self,
        number: int,
        work: Coroutine[Any, Any, Any],
        patience: Patience,
        deliver: Callable[[asyncio.Task[Any]], None],
    ) -> "asyncio.Task[Any]":
        """Begins to wait; `deliver` gets the task when it has ended, unless it was cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._waits[number] = task, patience, deliver
        task.add_done_callback(lambda _: self._deliver(number))
        return task

    async def end(self, number: int) -> bool:
        """Ends a wait before its time, and returns whether it came to nothing; False if there is none.

        What it has come to is delivered then.
        """
        if number not in self._waits:
            return False
        task, patience, _ = self._waits[number]
        patience.end()
        await asyncio.wait([task])
        self._deliver(number)
        return task.cancelled() or task.exception() is not None

    async def all_over(self) -> None:
        """Returns when none waits any more."""
        while self._waits:
            await asyncio.wait([task for task, _, _ in self._waits.values()])
            await asyncio.sleep(0)

    async def cancel(self) -> None:
        """Gives all of them up; those that have ended by then are delivered."""
        tasks = [task for task, _, _ in self._waits.values()]
        # What is cancelled before its first step could not take anything back.
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for number in [*self._waits]:
            self._deliver(number)

    def _deliver(self, number: int) -> None:
        waiting = self._waits.pop(number, None)
        if waiting is not None and not waiting[0].cancelled():
            task, _, deliver = waiting
            try:
                deliver(task)
            except Exception as failure:
                self._failed(failure)
