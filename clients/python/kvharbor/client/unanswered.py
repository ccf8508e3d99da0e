"""Requests of a stream from their sending to their answer, and who waits for these."""

from typing import Any, Protocol

from kvharbor.client.errors import HarborError
from kvharbor.client.outbox import Outgoing
from kvharbor.client.runs import BlockRun
from kvharbor.v1 import blocks_pb2


class Waiter(Protocol):
    """Who waits for room. Called under the guard."""

    def granted(self, message: blocks_pb2.Granted, spared: BlockRun) -> None:
        """Takes in the end of the wait; `spared` would have been released, and will not be."""

    def lost(self, cause: HarborError) -> None:
        """Takes in that the wait comes to nothing."""


class Answer:
    """What becomes of a request that somebody waits for; `abandoned`: nobody does any more."""

    def __init__(self) -> None:
        self.there = False
        self.abandoned = False
        self._value: Any = None
        self._error: HarborError | None = None

    def set(self, value: Any) -> None:
        """Takes in the answer."""
        self.there, self._value = True, value

    def fail(self, cause: HarborError) -> None:
        """Takes in why there is none."""
        self.there, self._error = True, cause

    def result(self) -> Any:
        """Returns the answer, or raises the error."""
        if self._error is not None:
            raise self._error
        return self._value


class Unanswered:
    """Requests in the order of their numbers, and the waits that answered ones have begun. Used under the guard."""

    def __init__(self) -> None:
        self._requests: dict[int, Outgoing] = {}
        self.waiters: dict[int, Waiter] = {}
        self.last_number = 0

    def add(self, outgoing: Outgoing) -> None:
        """Takes one in under the next number."""
        self.last_number += 1
        outgoing.number = self.last_number
        self._requests[outgoing.number] = outgoing

    def pop(self, number: int) -> Outgoing | None:
        """Takes out the one that is answered."""
        return self._requests.pop(number, None)

    def any_until(self, number: int) -> bool:
        """Whether one is left of those up to a number."""
        return next(iter(self._requests), number + 1) <= number

    def all(self) -> list[Outgoing]:
        """Returns all, in order."""
        return [*self._requests.values()]

    def releases(self) -> BlockRun:
        """Returns what is being released."""
        return BlockRun.join(each.releases for each in self._requests.values())

    def any_release_unsent(self) -> bool:
        """Whether there is one that `spare` would look at."""
        return any(not outgoing.sent and len(outgoing.releases) for outgoing in self._requests.values())

    def spare(self, held: BlockRun) -> BlockRun:
        """Keeps releases that are still to be sent from ending what was granted since they were made; returns that."""
        spared = []
        for outgoing in self._requests.values():
            if not outgoing.sent and len(outgoing.releases):
                found = outgoing.releases.among(held)
                spared.append(outgoing.releases[found])
                outgoing.releases = outgoing.releases[~found]
        return BlockRun.join(spared)

    def tell(self) -> None:
        """Takes out those whose effect the service's next process is told otherwise."""
        for outgoing in self.all():
            if outgoing.told is not None:
                del self._requests[outgoing.number]
                outgoing.told()

    def lose(self, cause: HarborError) -> None:
        """Fails those that cannot be sent again, and the waits."""
        self._fail([each for each in self.all() if each.sent and not each.repeatable and each.told is None], cause)
        waiters, self.waiters = self.waiters, {}
        for waiter in waiters.values():
            waiter.lost(cause)

    def fail(self, cause: HarborError) -> None:
        """Fails all."""
        self.lose(cause)
        self._fail(self.all(), cause)

    def _fail(self, failed: list[Outgoing], cause: HarborError) -> None:
        for outgoing in failed:
            del self._requests[outgoing.number]
            outgoing.fail(cause)
