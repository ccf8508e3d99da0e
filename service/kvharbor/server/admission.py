"""Allocates that wait for room: queued by `AdmissionQueue`, tried one at a time whenever room has changed.

Those that wait for what another session is computing do so in `SingleFlight`, without a place in this queue.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from kvharbor.pool import Awaited, Prompt, SequenceView
from kvharbor.pool.errors import PoolError, PoolExhausted
from kvharbor.pool.steps import Steps
from kvharbor.pool.waiting import AdmissionQueue, Ticket
from kvharbor.server.errors import ServerError
from kvharbor.server.owner import PoolOwner
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.single_flight import SingleFlight
from kvharbor.server.turns import Turns


class Applicant(Protocol):
    """Who asks: a session, as far as waiting is concerned."""

    @property
    def ended(self) -> bool:
        """Whether nothing may be granted to it any more."""


Granted = SequenceView | Awaited
"""What an Allocate comes to that has not been refused."""


@dataclass(frozen=True, slots=True, eq=False)
class Application:
    """One Allocate: whose it is, how to run it, and what it asks for."""

    applicant: Applicant
    tenant: str
    turns: Turns
    start: Callable[[], Steps[Granted]]
    prompt: Prompt
    reserve_tokens: int
    max_cached_tokens: int | None


@dataclass(slots=True, eq=False)
class _Waiter:
    application: Application
    refused: PoolExhausted
    answer: asyncio.Future[Granted]
    tried_now: bool = False
    overdue: bool = False


class Admission:
    """Grants Allocates of one pool, at once or when there is room. A waiter holds neither blocks nor a turn [S4].

    A grant under way is never torn from its caller by the end of its wait; the caller may still leave, and
    the sequence is then found by request_id, released, or ends with the session.
    """

    def __init__(self, owner: PoolOwner) -> None:
        self._owner = owner
        self.single_flight = SingleFlight(owner)
        self._queue = AdmissionQueue()
        self._waiters: dict[Ticket, _Waiter] = {}
        self._refused_in: tuple[int, int] | None = None
        self._queue_changed = False
        self._pumping = False
        owner.listeners.append(self._consider)

    @property
    def waiting_count(self) -> int:
        """Allocates that wait."""
        return len(self._waiters)

    async def allocate(self, application: Application, wait_s: float) -> SequenceView:
        """Returns the sequence, or raises PoolExhausted at once or after `wait_s`."""
        view = await self._grant(application, wait_s)
        assert isinstance(view, SequenceView)
        return view

    async def allocate_after_others(
        self,
        application: Application,
        unless_pending: Callable[[], Steps[Granted]],
        wait_s: float,
        pending_wait_s: float,
    ) -> SequenceView:
        """Lets others finish what they are computing of the prompt, for at most `pending_wait_s`, then allocates.

        `unless_pending` runs it as long as there is time for that. `wait_s` is what it may wait for room, beside that.
        """
        clock = self._owner.clock
        while True:
            began_at = clock()
            trial = application if pending_wait_s <= 0 else replace(application, start=unless_pending)
            granted = await self._grant(trial, wait_s)
            if isinstance(granted, SequenceView):
                return granted
            waits_from = clock()
            wait_s -= waits_from - began_at
            await self.single_flight.wait(application.applicant, granted, pending_wait_s)
            pending_wait_s -= clock() - waits_from
            if application.applicant.ended:
                raise SessionUnknown

    async def _grant(self, application: Application, wait_s: float) -> Granted:
        owner = self._owner
        if not self._waiters or self._may_pass(application):
            try:
                return await owner.run(application.turns, application.start)
            except PoolExhausted as refused:
                if wait_s <= 0:
                    raise
                needed_blocks = self._shortage(refused)
                last = refused
        else:
            needed_blocks = await self._estimate(application)
            last = self._refusal(needed_blocks)
            if wait_s <= 0:
                raise last
        return await self._wait(application, needed_blocks, last, wait_s)

    def give_up(self, applicant: Applicant, reason: ServerError) -> None:
        """Ends the waiting of one applicant with `reason`."""
        for waiter in self._waiters.values():
            if waiter.application.applicant is applicant and not waiter.answer.done():
                waiter.answer.set_exception(reason)
        self.single_flight.give_up(applicant, reason)

    def give_up_all(self, reason: ServerError) -> None:
        """Ends all waiting with `reason`."""
        for waiter in self._waiters.values():
            if not waiter.answer.done() and not waiter.tried_now:
                waiter.answer.set_exception(reason)
        self.single_flight.give_up_all(reason)

    async def _wait(
        self, application: Application, needed_blocks: int, refused: PoolExhausted, wait_s: float
    ) -> Granted:
        if application.applicant.ended:
            raise SessionUnknown
        now = self._owner.clock()
        ticket = self._queue.enqueue(application.tenant, needed_blocks, now, now + wait_s)
        waiter = _Waiter(application, refused, asyncio.get_running_loop().create_future())
        self._waiters[ticket] = waiter
        # One that might not pass the others has not been tried at all.
        self._queue_changed = True
        self._consider()
        try:
            await asyncio.wait([waiter.answer], timeout=wait_s)
            if not waiter.answer.done() and waiter.tried_now:
                waiter.overdue = True
                await asyncio.wait([waiter.answer])
            if waiter.answer.done():
                return waiter.answer.result()
            raise waiter.refused
        finally:
            if not waiter.answer.cancel() and not waiter.answer.cancelled():
                waiter.answer.exception()  # seen, even if the caller has just left
            del self._waiters[ticket]
            self._queue.discard(ticket)
            # Whoever this one was in the way of may be next.
            self._queue_changed = True
            self._consider()

    def _may_pass(self, application: Application) -> bool:
        config = self._owner.pool.config
        token_count = len(application.prompt.token_ids) // 4 + application.reserve_tokens
        # What can never fit is refused at once, not queued.
        is_hopeless = token_count > config.block_count * config.block_tokens
        return is_hopeless or self._queue.may_pass(application.tenant, self._owner.clock())

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
        """Tries those that may fit, in order, until one is answered."""
        for ticket in self._queue.candidates(self._owner.pool.available_block_count, self._owner.clock()):
            # A try that ends in its first slice gives nobody else a turn, and there may be a thousand.
            await asyncio.sleep(0)
            waiter = self._waiters.get(ticket)
            if waiter is None or waiter.answer.done():
                continue
            waiter.tried_now = True
            try:
                view = await self._owner.run(waiter.application.turns, waiter.application.start)
            except PoolExhausted as refused:
                ticket.needed_blocks = self._shortage(refused)
                waiter.refused = refused
                if waiter.overdue:
                    self._answer(ticket, waiter, refused)
            except PoolError as refused:
                self._answer(ticket, waiter, refused)
                return True
            else:
                self._answer(ticket, waiter, view)
                return True
            finally:
                waiter.tried_now = False
        return False

    def _answer(self, ticket: Ticket, waiter: _Waiter, answer: Granted | PoolError) -> None:
        self._queue.discard(ticket)
        if waiter.answer.done():
            return
        if isinstance(answer, PoolError):
            waiter.answer.set_exception(answer)
        else:
            waiter.answer.set_result(answer)

    def _room(self) -> tuple[int, int]:
        """What decides whether a refused request may fit now: room, and what it could share."""
        pool = self._owner.pool
        return pool.available_block_count, pool.committed_block_count

    def _shortage(self, refused: PoolExhausted) -> int:
        """Blocks that must be available for another try: matched ones that nobody holds count too."""
        needed, left = (int(str(refused.attributes[name])) for name in ("needed_block_count", "available_block_count"))
        return needed + max(self._owner.pool.available_block_count - left, 0)

    async def _estimate(self, application: Application) -> int:
        """Blocks that a request would need beyond its match, without trying it."""
        pool, prompt = self._owner.pool, application.prompt
        presence = await self._owner.run_unbound(
            lambda: pool.lookup(application.tenant, prompt, application.max_cached_tokens)
        )
        token_count = len(prompt.token_ids) // 4 + application.reserve_tokens - presence.cached_tokens
        return -(-token_count // pool.config.block_tokens)

    def _refusal(self, needed_blocks: int) -> PoolExhausted:
        """The refusal of one who may not pass those that wait."""
        stats = self._owner.pool.stats()
        return PoolExhausted(
            needed_block_count=needed_blocks,
            available_block_count=0,
            free_block_count=stats.free_block_count,
            cached_block_count=stats.cached_block_count,
            reserved_block_count=stats.reserved_block_count,
            active_block_count=stats.active_block_count,
            warm_block_count=stats.warm_block_count,
            quarantined_block_count=stats.quarantined_block_count,
            usable_block_count=stats.total_block_count,
        )
