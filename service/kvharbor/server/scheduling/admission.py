"""Requests that wait for room: queued by `AdmissionQueue`, tried one at a time whenever room has changed.

Those that wait for what another session is computing do so in `SingleFlight`, without a place in this queue.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kvharbor.pool import Awaited, SequenceView
from kvharbor.pool.errors import PoolError, PoolExhausted
from kvharbor.pool.steps import Steps
from kvharbor.pool.waiting import AdmissionQueue, Ticket
from kvharbor.server.errors import ServerError
from kvharbor.server.scheduling.applications import Applicant, Application, Waiter
from kvharbor.server.scheduling.owner import PoolOwner
from kvharbor.server.scheduling.single_flight import SingleFlight
from kvharbor.server.scheduling.want_of_room import missing, shortage
from kvharbor.server.session_errors import SessionUnknown

G = TypeVar("G")

Granted = SequenceView | Awaited
"""What an Allocate comes to that has not been refused."""

Wanted = Callable[[Applicant, int], None]


def _tell_nobody(*_: object) -> None:
    """Stands for whoever is told, where nobody is."""


class Admission:
    """Grants requests for room in one pool, at once or later. A waiter holds neither blocks nor a turn [S4].

    A grant under way is never torn from its caller by the end of its wait; the caller may still leave, and
    the sequence is then found by request_id, released, or ends with the session.

    `guarantee` tells how many reserved blocks each session is guaranteed: one that has fewer has a first claim [S35].
    """

    def __init__(
        self,
        owner: PoolOwner,
        *,
        guarantee: Callable[[], int] = lambda: 0,
    ) -> None:
        self._owner = owner
        self._guarantee = guarantee
        self.wanted: Wanted = _tell_nobody
        """Called when somebody lacks room, with him and how many blocks."""
        self.waiting_changed: Callable[[], None] = _tell_nobody
        """Called when somebody has begun or ended to wait."""
        self.single_flight = SingleFlight(owner)
        self.wait_count = 0
        """Times that a request began to wait."""
        self._queue = AdmissionQueue()
        self._waiters: dict[Ticket, Waiter[Any]] = {}
        self._refused_in: tuple[int, int] | None = None
        self._queue_changed = False
        self._pumping = False
        owner.listeners.append(self._consider)

    @property
    def waiting_count(self) -> int:
        """Requests that wait, and have not been answered yet."""
        return len(self._queue)

    def waiting(self) -> Iterator[tuple[Applicant, int]]:
        """Yields who waits, and how many blocks each lacks by its last try, at least 1."""
        available = self._owner.pool.available_block_count
        for ticket, waiter in self._waiters.items():
            yield waiter.application.applicant, max(ticket.needed_blocks - available, 1)

    async def allocate(self, application: Application[SequenceView], wait_s: float) -> SequenceView:
        """Returns the sequence, or raises PoolExhausted at once or after `wait_s`."""
        return await self._grant(application, wait_s)

    async def allocate_after_others(
        self,
        application: Application[SequenceView],
        unless_pending: Callable[[], Steps[Granted]],
        wait_s: float,
        pending_wait_s: float,
    ) -> SequenceView:
        """Lets others finish what they are computing of the prompt, for at most `pending_wait_s`, then allocates.

        `unless_pending` runs it as long as there is time for that. `wait_s` is what it may wait for room, beside that.
        """
        clock, patience = self._owner.clock, application.patience
        while True:
            began_at = clock()
            if pending_wait_s <= 0 or patience.is_over:
                return await self._grant(application, wait_s)
            granted = await self._grant(application.running(unless_pending), wait_s)
            if isinstance(granted, SequenceView):
                return granted
            waits_from = clock()
            wait_s -= waits_from - began_at
            await self.single_flight.wait(application.applicant, granted, pending_wait_s, patience)
            pending_wait_s -= clock() - waits_from
            if application.applicant.ended:
                raise SessionUnknown

    def require_passage(self, application: Application[Any]) -> None:
        """Refuses a newcomer who may not pass those that wait; what can never fit is left to be refused for ever."""
        if not self._may_pass(application):
            raise self._owner.pool.refuse(application.block_count)

    def lacks_room(self, applicant: Applicant, refused: PoolExhausted) -> None:
        """Somebody was refused for want of room, and does not wait for it."""
        self.wanted(applicant, missing(refused))

    def join(self, application: Application[G], refused: PoolExhausted, needed_blocks: int, wait_s: float) -> Waiter[G]:
        """Has a request wait that was just refused; then await its `outcome`, or `leave`."""
        now = self._owner.clock()
        ticket = self._queue.enqueue(application.tenant, needed_blocks, now, now + wait_s)
        waiter = Waiter(application, refused, asyncio.get_running_loop().create_future(), ticket)
        self._waiters[ticket] = waiter
        self.wait_count += 1
        self.waiting_changed()
        application.patience.begin(waiter.time_is_over)
        # One that might not pass the others has not been tried at all.
        self._queue_changed = True
        self._consider()
        self.wanted(application.applicant, max(needed_blocks - self._owner.pool.available_block_count, 1))
        return waiter

    async def outcome(self, waiter: Waiter[G]) -> G:
        """Returns what was waited for; raises the last refusal when the time is over."""
        try:
            await asyncio.wait([waiter.answer], timeout=waiter.ticket.deadline - self._owner.clock())
            if not waiter.answer.done():
                waiter.time_is_over()
                await asyncio.wait([waiter.answer])
        except asyncio.CancelledError:
            try:
                if waiter.tried_now:
                    # What is given back stands in line for the session's turn before whatever comes after this.
                    waiter.overdue = True
                    await asyncio.wait([waiter.answer])
            finally:
                self.leave(waiter)
            raise
        self._take_out(waiter)
        return waiter.answer.result()

    def leave(self, waiter: Waiter[Any]) -> None:
        """Lets somebody go who waits no longer, and gives back what he was granted meanwhile; repeating it is nothing.

        A grant under way is given back when it is there.
        """
        answer = waiter.answer
        if not answer.cancel() and not answer.cancelled() and answer.exception() is None:
            waiter.application.give_back(answer.result())
        self._take_out(waiter)

    def _take_out(self, waiter: Waiter[Any]) -> None:
        if self._waiters.pop(waiter.ticket, None) is not None:
            self._queue.discard(waiter.ticket)
            self.waiting_changed()
            # Whoever this one was in the way of may be next.
            self._queue_changed = True
            self._consider()

    def give_up(self, applicant: Applicant, reason: ServerError) -> None:
        """Ends the waiting of one applicant with `reason`."""
        for waiter in self._waiters.values():
            if waiter.application.applicant is applicant and not waiter.answer.done():
                waiter.answer.set_exception(reason)
        self.single_flight.give_up(applicant, reason)

    def give_up_all(self, reason: ServerError) -> None:
        """Ends all waiting with `reason`."""
        for waiter in self._waiters.values():
            if waiter.tried_now:
                waiter.overdue = True
            elif not waiter.answer.done():
                waiter.answer.set_exception(reason)
        self.single_flight.give_up_all(reason)

    def close(self) -> None:
        """Tells nobody any more. Who is told knows the admission: together they would keep the pool."""
        self.wanted = self.waiting_changed = _tell_nobody

    async def _grant(self, application: Application[G], wait_s: float) -> G:
        owner = self._owner
        waits = wait_s > 0 and not application.patience.is_over
        if self._may_pass(application):
            try:
                return await owner.run(application.turns, application.start)
            except PoolExhausted as refused:
                if not waits:
                    self.lacks_room(application.applicant, refused)
                    raise
                needed_blocks = shortage(self._owner.pool, refused)
                last = refused
        else:
            estimate = application.estimate
            needed_blocks = application.block_count if estimate is None else await owner.run_unbound(estimate)
            last = owner.pool.refuse(needed_blocks)
            if not waits:
                self.lacks_room(application.applicant, last)
                raise last
        if application.applicant.ended:
            raise SessionUnknown
        return await self.outcome(self.join(application, last, needed_blocks, wait_s))

    def _may_pass(self, application: Application[Any]) -> bool:
        # What can never fit is refused at once, not queued.
        if not self._waiters or application.block_count > self._owner.pool.config.block_count:
            return True
        claims: dict[int, bool] = {}
        self._renew_claims(claims)
        has_first_claim = self._has_first_claim(application.applicant, claims)
        return self._queue.may_pass(application.tenant, self._owner.clock(), has_first_claim=has_first_claim)

    def _renew_claims(self, claims: dict[int, bool]) -> None:
        for ticket, waiter in self._waiters.items():
            ticket.has_first_claim = self._has_first_claim(waiter.application.applicant, claims)

    def _has_first_claim(self, applicant: Applicant, claims: dict[int, bool]) -> bool:
        """Whether a session has less than it is guaranteed; `claims` is what was found out in this step."""
        number = applicant.number
        if number not in claims:
            claims[number] = self._owner.pool.reserved_block_count(number) < self._guarantee()
        return claims[number]

    def _consider(self) -> None:
        if self._waiters and not self._pumping and (self._queue_changed or self._room() != self._refused_in):
            self._pumping = True
            self._owner.spawn(self._pump())

    async def _pump(self) -> None:
        try:
            while self._waiters:
                room = self._room()
                self._queue_changed = False
                served = await self._serve_next()
                if not served and not self._queue_changed and self._room() == room:
                    self._refused_in = room
                    return
        finally:
            self._pumping = False

    async def _serve_next(self) -> bool:
        """Tries those that may fit, in order, until one is answered, or one is refused whom nobody may pass."""
        now = self._owner.clock()
        self._renew_claims({})
        self._doubt_needs()
        for ticket in self._queue.candidates(self._owner.pool.available_block_count, now):
            # A try that ends in its first slice gives nobody else a turn, and there may be a thousand.
            await asyncio.sleep(0)
            waiter = self._waiters.get(ticket)
            if waiter is None or waiter.answer.done():
                continue
            if await self._try(waiter) or ticket.has_first_claim or ticket.is_impatient(now):
                return True
        return False

    def _doubt_needs(self) -> None:
        """Has the next in line tried if anything was published since their last try: they may lack less by now."""
        published_count = self._owner.pool.committed_block_count
        for ticket in self._queue.heads():
            if self._waiters[ticket].published_count != published_count:
                ticket.needed_blocks = 0

    async def _try(self, waiter: Waiter[Any]) -> bool:
        """Returns whether the waiter is answered now."""
        waiter.tried_now = True
        waiter.published_count = self._owner.pool.committed_block_count
        try:
            granted = await self._owner.run(waiter.application.turns, waiter.application.start)
        except PoolExhausted as refused:
            waiter.ticket.needed_blocks = shortage(self._owner.pool, refused)
            waiter.refused = refused
            if waiter.overdue and not waiter.answer.done():
                waiter.answer.set_exception(refused)
            return False
        except PoolError as refused:
            self._queue.discard(waiter.ticket)
            if not waiter.answer.done():
                waiter.answer.set_exception(refused)
        else:
            self._queue.discard(waiter.ticket)
            if waiter.answer.done():
                waiter.application.give_back(granted)
            else:
                waiter.answer.set_result(granted)
        finally:
            waiter.tried_now = False
        return True

    def _room(self) -> tuple[int, int]:
        """What decides whether a refused request may fit now: room, and what it could share."""
        pool = self._owner.pool
        return pool.available_block_count, pool.committed_block_count
