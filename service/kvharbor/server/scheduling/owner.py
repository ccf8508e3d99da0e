"""The one place that drives a pool: each operation to its end, slice by slice, each session's in order."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from kvharbor.gpumem import InsufficientMemory
from kvharbor.pool import Fork, Pool, SequenceView
from kvharbor.pool.errors import InvariantViolation, PoolError
from kvharbor.pool.steps import Steps
from kvharbor.server.errors import ServerError
from kvharbor.server.scheduling.event_log import EventLog
from kvharbor.server.scheduling.turns import Turns
from kvharbor.server.supervision.crash import Crash

T = TypeVar("T")

_ROUNDS: Final = 4
"""Of the event loop between two slices. A call takes some to arrive, and to be answered: with one round it would wait
for a slice at each of these steps. Where nobody else is there, a round takes some microseconds."""


class PoolOwner:
    """Owns `pool`: nobody else calls it, except to read.

    A slice runs without interruption; between two slices the event loop serves others [S1]. An operation that
    has begun ends, even if its call is cancelled meanwhile [S2]. `listeners` are called after every slice.
    """

    def __init__(self, pool: Pool, events: EventLog, clock: Callable[[], float], crash: Crash) -> None:
        self.pool = pool
        self.events = events
        self.clock = clock
        self.listeners: list[Callable[[], None]] = []
        self._crash = crash
        self._unbound = Turns()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, turns: Turns, start: Callable[[], Steps[T]]) -> T:
        """Runs an operation when its session's turn comes and returns its result.

        Cancelled while it waits for its turn, nothing happens; cancelled later, it ends in the background.
        """
        if not turns.try_take():
            await turns.take()
        self.pool.tell_time(self.clock())
        try:
            steps = start()
            next(steps)
        except StopIteration as stop:
            turns.leave()
            self._settle()
            result: T = stop.value
            return result
        except BaseException as failure:
            turns.leave()
            self._check(failure)
            self._settle()
            raise
        self._settle()
        return await self.in_background(self._go_on(turns, steps))

    async def run_unbound(self, start: Callable[[], Steps[T]]) -> T:
        """Runs an operation that belongs to no session. It has no order with those that do."""
        return await self.run(Turns(), start)

    async def in_turn(self, turns: Turns, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs `work`, which may be several operations, to its end as one turn of a session."""
        await turns.take()
        return await self.in_background(self._turn(turns, work()))

    async def in_background(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end even if the caller is cancelled, and returns its result."""
        return await asyncio.shield(self.spawn(work))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts `work`, which `close` will wait for. Anything but a refusal out of it ends the process."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def fork(
        self,
        turns: Turns,
        start: Callable[[], Steps[Fork]],
        copy: Callable[[tuple[tuple[int, int], ...]], Awaitable[None]],
    ) -> tuple[SequenceView, ...]:
        """Runs a fork with its copies and returns the children; all of it is one turn of the session."""
        return await self.in_turn(turns, lambda: self._forked(start, copy))

    def call(self, change: Callable[[], T]) -> T:
        """Runs a short operation of the pool at once."""
        self.pool.tell_time(self.clock())
        try:
            return change()
        except BaseException as failure:
            self._check(failure)
            raise
        finally:
            self._settle()

    def reschedule(self) -> None:
        """Sets the timer for the next end of a pin or hand-off; to be called when one was made."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.pool.next_deadline()
        if deadline is not None:
            delay_s = max(deadline - self.clock(), 0.0)
            # The loop's own limit on timeouts is a matter of days.
            self._timer = asyncio.get_running_loop().call_later(
                min(delay_s, 3600.0), lambda: self.spawn(self._expire_due())
            )

    async def close(self) -> None:
        """Waits for what is under way and stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        # They know the owner, and it them: without them the pool goes as soon as nobody has it, collector or not.
        self.listeners.clear()

    async def _go_on(self, turns: Turns, steps: Steps[T]) -> T:
        try:
            return await self._drive(steps)
        finally:
            turns.leave()

    async def _drive(self, steps: Steps[T]) -> T:
        try:
            while True:
                for _ in range(_ROUNDS):
                    await asyncio.sleep(0)
                self.pool.tell_time(self.clock())
                next(steps)
                self._settle()
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException as failure:
            self._check(failure)
            raise
        finally:
            self._settle()

    async def _turn(self, turns: Turns, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        finally:
            turns.leave()

    async def _forked(
        self,
        start: Callable[[], Steps[Fork]],
        copy: Callable[[tuple[tuple[int, int], ...]], Awaitable[None]],
    ) -> tuple[SequenceView, ...]:
        made = await self._drive(start())
        if made.copies:
            try:
                await copy(made.copies)
            except BaseException:
                self.call(lambda: self.pool.abort_fork(made))
                raise
        return self.call(lambda: self.pool.finish_fork(made))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._check(failure)

    async def _expire_due(self) -> None:
        await self.run(self._unbound, lambda: self.pool.expire(self.clock()))
        self.reschedule()

    def _settle(self) -> None:
        events = self.pool.drain_events()
        if events:
            self.events.append(events)
        for listener in self.listeners:
            listener()

    def _check(self, failure: BaseException) -> None:
        """Ends the process if `failure` is no refusal: then the pool's state is not known any more."""
        refused = isinstance(failure, PoolError | ServerError | InsufficientMemory)
        refused = refused and not isinstance(failure, InvariantViolation)
        if not refused and not isinstance(failure, asyncio.CancelledError):
            self._crash(failure)


def offset_clock(offset_s: float) -> Callable[[], float]:
    """Returns the clock of the running event loop with an offset, so that a time taken elsewhere shows [S21]."""
    return lambda: asyncio.get_running_loop().time() + offset_s
