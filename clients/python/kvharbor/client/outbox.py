"""What is to be sent on one stream, in order, until that ends."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kvharbor.client.errors import HarborError
from kvharbor.client.runs import NO_BLOCKS, BlockRun
from kvharbor.client.signs import Signs
from kvharbor.v1 import stream_service_pb2 as stream_pb2


@dataclass(eq=False, slots=True)
class Outgoing:
    """One request, from `send` to its answer.

    `make` makes the message, in the thread that sends it. `take` takes in the answer and `fail` that none will come,
    both under the link's guard. Without an answer when the service's process is replaced [C17], it is sent to the next
    one if it is `repeatable`; `told`, where it is given, is called instead, as the effect becomes part of what the next
    one is told with Resume.

    `grants` reads what the caller holds by an answer: until that is known no release is sent that was made meanwhile,
    as it must not end these holds. `releases` has what this one ends, if it does.
    """

    make: Callable[["Outgoing"], stream_pb2.ConverseRequest]
    take: Callable[[stream_pb2.ConverseResponse], object]
    fail: Callable[[HarborError], object]
    repeatable: bool = False
    told: Callable[[], object] | None = None
    grants: Callable[[stream_pb2.ConverseResponse], BlockRun] | None = None
    releases: BlockRun = NO_BLOCKS
    number: int = 0
    sent: bool = False

    def message(self) -> stream_pb2.ConverseRequest:
        """Returns it as it is sent."""
        message = self.make(self)
        message.number = self.number
        return message


class Outbox:
    """The iterator that gRPC takes requests from, in a thread of its own.

    It knows no link, so that the thread keeps none alive. Between requests the thread gives the `signs` that are due.
    """

    def __init__(self, waiting: Iterable[Outgoing], signs: Signs) -> None:
        self._waiting = deque(waiting)
        self._signs = signs
        self._unknown_count = 0
        self._closed = False
        # Reentrant: the collector may close it in whatever thread it runs in.
        self._changed = threading.Condition()

    def put(self, outgoing: Outgoing) -> None:
        """Sends it after what was put before."""
        with self._changed:
            self._waiting.append(outgoing)
            self._changed.notify()

    def paused(self) -> AbstractContextManager[object]:
        """Sends nothing inside of the context."""
        return self._changed

    def grants_known(self) -> None:
        """Lets releases go on, as far as no other request keeps them: what one was granted has been taken in."""
        with self._changed:
            self._unknown_count -= 1
            self._changed.notify()

    def look(self) -> None:
        """Has the thread ask the signs when one is due."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Ends the iterator, whatever waits in it."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> stream_pb2.ConverseRequest:
        while (outgoing := self._next()) is None:
            self._signs.give()
        return outgoing.message()

    def _next(self) -> Outgoing | None:
        """Waits for the next request; None: it is time for a sign."""
        with self._changed:
            while not self._may_go_on():
                pause_s = self._signs.pause_s()
                if pause_s == 0:
                    return None
                if not self._closed:  # the collector may have run just now
                    self._changed.wait(pause_s)
            if self._closed:
                raise StopIteration
            outgoing = self._waiting.popleft()
            outgoing.sent = True
            self._unknown_count += outgoing.grants is not None
            return outgoing

    def _may_go_on(self) -> bool:
        if self._closed or not self._waiting:
            return self._closed
        return not self._unknown_count or not len(self._waiting[0].releases)
