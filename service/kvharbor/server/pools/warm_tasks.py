"""Prefixes that operators want warm and engines are to compute: which wait, which are being filled, which are over.

The book of one pool, without I/O. A task waits until an engine claims it, is then filling, and is over when its
pin is whole, or when it was ended, expired or claimed too often. How far a pin is, only the pool knows.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvharbor.pool import PinView, Prompt
from kvharbor.server.errors import TooManyWarmTasks

MAX_TASKS: Final = 1024
"""Unfinished tasks of a pool. Each keeps its prompt."""
MAX_CLAIMS: Final = 3
"""A prefix that three engines in turn have not finished would not be finished by a fourth."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who computes a task, and by which request_id; one that is empty names nothing."""

    session: int
    request_id: str


@dataclass(slots=True, eq=False)
class WarmTask:
    """A prefix to compute for the pin `name`, until `expires_at` of the owner's clock.

    `claim` is the latest one; None also while a caller of Warmup fills the pin. `over` is set at the end.
    """

    name: str
    prompt: Prompt
    expires_at: float | None
    claim: Claim | None = None
    claim_count: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def expired(self, now: float) -> bool:
        """Whether its time is over."""
        return self.expires_at is not None and self.expires_at <= now


class WarmTasks:
    """The unfinished tasks of a pool, at most one for each name of a pin; both tables are oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[str, WarmTask] = {}
        self._filling: dict[str, WarmTask] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._waiting or name in self._filling

    @property
    def waiting_count(self) -> int:
        """Tasks that nobody is at work on."""
        return len(self._waiting)

    @property
    def filling_count(self) -> int:
        """Tasks that somebody is at work on."""
        return len(self._filling)

    def unfinished(self, now: float) -> tuple[int, int]:
        """Returns how many tasks wait and how many are being filled, without those whose time is over."""
        waiting = sum(not task.expired(now) for task in self._waiting.values())
        filling = sum(not task.expired(now) for task in self._filling.values())
        return waiting, filling

    def require_room(self, name: str, now: float) -> None:
        """Raises TooManyWarmTasks if a task of this name would be one too many."""
        self._drop_expired(now)
        count = len(self._waiting) + len(self._filling)
        if count >= MAX_TASKS and name not in self:
            raise TooManyWarmTasks(count, limit=MAX_TASKS)

    def put(self, name: str, prompt: Prompt, expires_at: float | None, *, filling: bool) -> WarmTask:
        """Adds a task, or renews the time of the one that is the same; one of other tokens is over.

        `filling`: somebody is computing the prefix already, so the task waits only if that comes to nothing.
        """
        task = self._waiting.get(name) or self._filling.get(name)
        if task is not None and task.prompt == prompt:
            task.expires_at = expires_at
            return task
        self.end(name)
        task = WarmTask(name, prompt, expires_at)
        (self._filling if filling else self._waiting)[name] = task
        return task

    def next(self, now: float) -> WarmTask | None:
        """Returns the task that has waited longest, and leaves it there."""
        self._drop_expired(now)
        return next(iter(self._waiting.values()), None)

    def claimed(self, claim: Claim) -> WarmTask | None:
        """Returns the task that this claim has got before, if it is still being filled."""
        if not claim.request_id:
            return None
        return next((task for task in self._filling.values() if task.claim == claim), None)

    def fill(self, task: WarmTask, claim: Claim | None) -> None:
        """Somebody is at work on a task that waits: the claimer, or a caller of Warmup. Repeated: no change."""
        if self._waiting.get(task.name) is task:
            del self._waiting[task.name]
            self._filling[task.name] = task
            task.claim = claim
            task.claim_count += claim is not None

    def end(self, name: str) -> bool:
        """The task of this name is over; False if there is none."""
        task = self._waiting.pop(name, None) or self._filling.pop(name, None)
        if task is not None:
            task.over.set()
        return task is not None

    def end_all(self) -> None:
        """All tasks are over."""
        for name in [*self._waiting, *self._filling]:
            self.end(name)

    def settle(self, pin_of: Callable[[str], PinView | None], now: float) -> list[WarmTask]:
        """Looks how far the tasks are that are being filled; O(their number).

        Whole ones and expired ones are over. Those that nobody fills any more wait again, behind the others;
        the ones that were claimed too often are over as well, and returned.
        """
        given_up = []
        for task in [*self._filling.values()]:
            pin = pin_of(task.name)
            if pin is not None and pin.missing_tokens and pin.filling:
                continue
            if (pin is not None and not pin.missing_tokens) or task.expired(now):
                self.end(task.name)
            elif task.claim_count >= MAX_CLAIMS:
                self.end(task.name)
                given_up.append(task)
            else:
                self._waiting[task.name] = self._filling.pop(task.name)
        return given_up

    def _drop_expired(self, now: float) -> None:
        for task in [task for task in self._waiting.values() if task.expired(now)]:
            self.end(task.name)
