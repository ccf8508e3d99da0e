"""A pool's pins as its callers change them, and the engines that fill them for operators."""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog

from kvharbor.pool import PinView, Prompt, SequenceView, Warmed
from kvharbor.pool.steps import Steps
from kvharbor.server.errors import ServerError, WarmTaskNotFound
from kvharbor.server.pools.warm_tasks import Claim, WarmTask, WarmTasks
from kvharbor.server.scheduling.owner import PoolOwner
from kvharbor.server.scheduling.turns import Turns
from kvharbor.server.sessions.session import Session

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PinRequest:
    """A prefix to pin under a name, until `expires_at` of the owner's clock or until it is ended."""

    prompt: Prompt
    name: str
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class Ordered:
    """How far a pin is that engines fill. `task_pending`: it waits for one, or one is at work on it."""

    pinned_tokens: int
    missing_tokens: int
    task_pending: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    """A task and the claimer's sequence for it."""

    asked: PinRequest
    sequence: SequenceView


class WarmDesk:
    """Changes the pins of one pool, one after the other, so that a pin and its task are of the same request.

    Whoever holds the desk has its session's turn already, if it has a session, so it waits for nobody. All
    accepting sessions are told of a task that waits; which one gets it, a claim decides.
    """

    def __init__(self, owner: PoolOwner, *, tenant: str, pool_id: str, sessions: Collection[Session]) -> None:
        self._owner = owner
        self._tenant = tenant
        self._pool_id = pool_id
        self._sessions = sessions
        self._desk = asyncio.Lock()
        self._tasks = WarmTasks()
        self._ended_by: ServerError | None = None
        owner.listeners.append(self._settle)

    @property
    def accepting_session_count(self) -> int:
        """Sessions that have the pool open and accept tasks."""
        return sum(1 for session in self._sessions if session.warm_notices is not None and not session.ended)

    @property
    def task_counts(self) -> tuple[int, int]:
        """Tasks that wait for an engine, and tasks that somebody is at work on."""
        return self._tasks.unfinished(self._owner.clock())

    async def by_caller(self, session: Session, turns: Turns, asked: PinRequest) -> Warmed:
        """Pins what is there and gives the session a sequence for the rest."""
        return await self._owner.in_turn(turns, lambda: self._pin(session.number, asked))

    async def by_nobody(self, asked: PinRequest) -> Warmed:
        """Pins what is there."""
        return await self._owner.in_background(self._pin(None, asked))

    async def by_engine(self, asked: PinRequest, wait_s: float) -> Ordered:
        """Pins what is there and has an engine compute the rest; waits until that is over, at most `wait_s`."""
        warmed, task = await self._owner.in_background(self._order(asked))
        if task is None:
            return Ordered(warmed.pinned_tokens, warmed.missing_tokens, task_pending=False)
        if wait_s > 0:
            await self._until_over(task, wait_s)
        pin = self._pin_of(asked.name)
        whole = warmed.pinned_tokens + warmed.missing_tokens
        pinned_tokens = min(pin.pinned_tokens, whole) if pin is not None else 0
        pending = not task.over.is_set() and not task.expired(self._owner.clock())
        return Ordered(pinned_tokens, whole - pinned_tokens, pending)

    async def unwarm(self, name: str) -> None:
        """Ends a pin and its task. Raises PinNotFound if there is neither."""
        await self._owner.in_background(self._unpin(name))

    async def claim(
        self, session: Session, turns: Turns, request_id: str, *, granted: Callable[[int], None] = lambda _: None
    ) -> Claimed:
        """Gives the session the task that waits longest; raises WarmTaskNotFound if none does.

        `granted` gets the number of the sequence, whatever becomes of the call.
        """
        if session.warm_notices is not None:
            session.warm_notices.answered(self._pool_id)
        claim = Claim(session.number, request_id)

        async def work() -> Claimed:
            claimed = await self._claim(claim)
            granted(claimed.sequence.number)
            return claimed

        claimed = await self._owner.in_turn(turns, work)
        if self._tasks.waiting_count:
            self._tell(session)
        return claimed

    def welcome(self, session: Session) -> None:
        """Tells a session that has just got the pool's memory of what waits there."""
        if session.warm_notices is not None:
            session.warm_notices.answered(self._pool_id)
            if self._tasks.waiting_count:
                self._tell(session)

    def end_waits(self, reason: ServerError) -> None:
        """Ends the waiting of every `by_engine` with `reason`; the tasks go with the pool."""
        self._ended_by = reason
        self._tasks.end_all()

    async def _pin(self, session: int | None, asked: PinRequest) -> Warmed:
        async with self._desk:
            warmed = await self._warmup(session, asked, present_only=session is None)
            # The last request for a name decides who fills its pin.
            self._tasks.end(asked.name)
            return warmed

    async def _order(self, asked: PinRequest) -> tuple[Warmed, WarmTask | None]:
        async with self._desk:
            self._tasks.require_room(asked.name, self._owner.clock())
            warmed = await self._warmup(None, asked, present_only=True, room_for_all=True)
            if not warmed.missing_tokens:
                self._tasks.end(asked.name)
                return warmed, None
            pin = self._pin_of(asked.name)
            filling = pin is not None and pin.filling
            task = self._tasks.put(asked.name, asked.prompt, asked.expires_at, filling=filling)
            if self._tasks.waiting_count:
                self._tell(*self._sessions)
            return warmed, task

    async def _unpin(self, name: str) -> None:
        async with self._desk:
            had_task = self._tasks.end(name)
            # Of a prefix of which nothing is there yet only the task exists.
            if self._pin_of(name) is not None or not had_task:
                await self._owner.run_unbound(lambda: self._owner.pool.unwarm(self._tenant, name))
                self._owner.reschedule()

    async def _claim(self, claim: Claim) -> Claimed:
        async with self._desk:
            task = self._tasks.claimed(claim) or self._tasks.next(self._owner.clock())
            while task is not None:
                asked = PinRequest(task.prompt, task.name, task.expires_at)
                warmed = await self._warmup(claim.session, asked, request_id=claim.request_id)
                if warmed.sequence is not None:
                    self._tasks.fill(task, claim)
                    return Claimed(asked, warmed.sequence)
                if warmed.missing_tokens:
                    self._tasks.fill(task, None)  # somebody else has a sequence for it
                else:
                    self._tasks.end(task.name)
                task = self._tasks.next(self._owner.clock())
            raise WarmTaskNotFound(self._pool_id)

    async def _warmup(
        self,
        session: int | None,
        asked: PinRequest,
        *,
        present_only: bool = False,
        room_for_all: bool = False,
        request_id: str = "",
    ) -> Warmed:
        def start() -> Steps[Warmed]:
            return self._owner.pool.warmup(
                self._tenant,
                session,
                asked.prompt,
                asked.name,
                expires_at=asked.expires_at,
                present_only=present_only,
                room_for_all=room_for_all,
                request_id=request_id,
            )

        warmed = await self._owner.run_unbound(start)
        self._owner.reschedule()
        return warmed

    async def _until_over(self, task: WarmTask, wait_s: float) -> None:
        clock = self._owner.clock
        deadline = clock() + wait_s
        while self._ended_by is None and not task.over.is_set():
            # A task that waits has no timer: its time is looked at here, and may have been renewed.
            left_s = min(deadline, deadline if task.expires_at is None else task.expires_at) - clock()
            if left_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(task.over.wait(), left_s)
        if self._ended_by is not None:
            raise self._ended_by

    def _settle(self) -> None:
        if not self._tasks.filling_count:
            return
        waiting_count = self._tasks.waiting_count
        for task in self._tasks.settle(self._pin_of, self._owner.clock()):
            log.warning("warm task given up", pool=self._pool_id, pin=task.name, claim_count=task.claim_count)
        if self._tasks.waiting_count > waiting_count:
            log.info("warm task waits again", pool=self._pool_id)
            self._tell(*self._sessions)

    def _tell(self, *sessions: Session) -> None:
        for session in sessions:
            if session.warm_notices is not None and not session.ended:
                session.warm_notices.tell(self._pool_id)

    def _pin_of(self, name: str) -> PinView | None:
        return self._owner.pool.pin(self._tenant, name)
