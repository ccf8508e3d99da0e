"""What asks for room: one request, whose it is, and what waiting means to it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvharbor.pool.errors import PoolExhausted
from kvharbor.pool.steps import Steps
from kvharbor.pool.waiting import Ticket
from kvharbor.server.scheduling.turns import Turns

G = TypeVar("G")
H = TypeVar("H")


class Applicant(Protocol):
    """Who asks: a session, as far as waiting is concerned."""

    @property
    def number(self) -> int:
        """What the pool knows it by."""

    @property
    def ended(self) -> bool:
        """Whether nothing may be granted to it any more."""


def _nothing() -> None:
    pass


def _nobody_cares(_: object) -> None:
    pass


@dataclass(slots=True, eq=False)
class Patience:
    """What the waits of one request have in common: `begins` is called at the first, and `end` ends them all.

    An end before its time is one at its time: the request comes to what it would have come to then.
    """

    begins: Callable[[], None] = _nothing
    is_over: bool = False
    _end: Callable[[], None] = _nothing

    def begin(self, end: Callable[[], None]) -> None:
        """A wait begins, which `end` ends: at once, if the patience was over before."""
        self._end = end
        begins, self.begins = self.begins, _nothing
        begins()
        if self.is_over:
            end()

    def end(self) -> None:
        """Lets it wait no longer; repeating it is nothing."""
        self.is_over = True
        self._end()


@dataclass(frozen=True, slots=True, eq=False)
class Application(Generic[G]):
    """One request for room, and how to run it.

    `block_count` are the blocks that it asks for in all, those included that it may find; `estimate` tells how many
    it would find missing, without trying it. `give_back` is called with a grant that nobody takes any more.
    """

    applicant: Applicant
    tenant: str
    turns: Turns
    start: Callable[[], Steps[G]]
    block_count: int
    estimate: Callable[[], Steps[int]] | None = None
    patience: Patience = field(default_factory=Patience)
    give_back: Callable[[G], None] = _nobody_cares

    def running(self, start: Callable[[], Steps[H]]) -> "Application[H]":
        """Returns it as another operation."""
        return Application(
            self.applicant, self.tenant, self.turns, start, self.block_count, self.estimate, self.patience
        )


@dataclass(slots=True, eq=False)
class Waiter(Generic[G]):
    """A request in the queue; `refused` is what its last try came to, with so many blocks published by then."""

    application: Application[G]
    refused: PoolExhausted
    answer: "asyncio.Future[G]"
    ticket: Ticket
    published_count: int = -1
    tried_now: bool = False
    overdue: bool = False

    def time_is_over(self) -> None:
        """Ends the wait, after the try that is under way if there is one."""
        if self.tried_now:
            self.overdue = True
        elif not self.answer.done():
            self.answer.set_exception(self.refused)
