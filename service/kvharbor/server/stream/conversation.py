"""One stream of a session: requests are served one after the other, as they come [S33]."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Protocol

import grpc
import structlog

from kvharbor.pool.errors import InvalidField
from kvharbor.server.calls.gate import Gate
from kvharbor.server.errors import ServerError, WatcherTooSlow
from kvharbor.server.messages.status import CODES, REFUSALS, Refusal, item_status
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.sessions.session import Session
from kvharbor.server.stream.outbox import Outbox
from kvharbor.v1 import stream_service_pb2 as pb

log = structlog.get_logger(__name__)

Respond = Callable[[int, Any], Awaitable[None]]
"""Serves one request, by its number: what it comes to goes to the outbox."""


class Replaced(Exception):
    """Another stream of the session has taken this one's place."""


class Channel(Protocol):
    """The transport's side of a stream."""

    async def read(self) -> Any:
        """Returns the next request, or grpc.aio.EOF."""

    async def write(self, message: Any) -> None:
        """Sends a response, once the other side has room for it."""


class Conversation:
    """Reads requests and sends what they come to, until one side ends it.

    `responding` has what serves a request, by its field in ConverseRequest. `waits_over` returns when nothing waits
    any more that was begun here. `over` is for whoever runs it to set, when all is taken back that has not left.
    """

    def __init__(self, session: Session, gate: Gate) -> None:
        self.outbox = Outbox()
        self.responding: dict[str, Respond] = {}
        self.waits_over: Callable[[], Coroutine[Any, Any, None]] = _at_once
        self.session = session
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gate = gate
        # A result, as nobody may be left to take an exception.
        self._ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._finishes_with: ServerError | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_serving = False
        self._last_number = 0

    def recall(self, pool_id: str, block_count: int) -> None:
        """Asks for leased blocks of a pool."""
        self.outbox.put_recall(pool_id, block_count)

    def end(self, reason: BaseException) -> None:
        """Ends the stream at once; what is under way in the pools ends by itself."""
        if not self._ended.done():
            self._ended.set_result(reason)

    def finish(self, reason: ServerError) -> None:
        """Ends the stream with `reason` when the request that is being served has been answered, and what waits."""
        self._finishes_with = reason
        if self._reading is not None and not self._is_serving:
            self._reading.cancel()

    async def run(self, channel: Channel, earlier: Collection["asyncio.Future[None]"] = ()) -> None:
        """Returns when the other side has said all and got all; raises what else ends the stream.

        Serves nothing before the `earlier` streams of the session are over: what they take back could be what this one
        is told that it holds.
        """
        if earlier:
            await asyncio.wait(earlier)
        if self._ended.done():
            raise self._ended.result()
        self._reading = asyncio.create_task(self._read(channel.read))
        writing = asyncio.create_task(self.outbox.send_all(channel.write))
        saying_all = asyncio.create_task(self._say_all(self._reading))
        ends = (saying_all, writing, self._ended)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if saying_all.done() and not self._ended.done():
                self.outbox.close()
                await asyncio.wait(ends[1:], return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise self._ended.result()
            # A transport that takes nothing any more has no use for a reason either.
            if saying_all.done():
                await saying_all
        finally:
            for task in (self._reading, writing, saying_all):
                task.cancel()
            await asyncio.gather(self._reading, writing, saying_all, return_exceptions=True)
            self._ended.cancel()

    async def timed(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Runs one call of the stream, counted as a unary one is; raises what it is refused with."""
        gate, began_at = self._gate, time.perf_counter()
        code = "INTERNAL"
        gate.enter()
        try:
            result = await work()
            code = "OK"
        except REFUSALS as refused:
            code = CODES[type(refused)].name
            raise
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            gate.timings.add(name, code, time.perf_counter() - began_at)
            gate.leave()
        return result

    def send(self, response: pb.ConverseResponse, undo: Callable[[], None] | None = None) -> None:
        """Sends a response; `undo` takes back what it tells, if it does not leave."""
        try:
            self.outbox.put(response, undo)
        except WatcherTooSlow as slow:
            log.warning("stream cut off", session=self.session.number, unsent_count=slow.pending_event_count)
            self.end(slow)

    def refuse(self, number: int, refused: Refusal) -> None:
        """Answers a request with its refusal."""
        self.send(pb.ConverseResponse(number=number, refusal=item_status(refused)))

    async def _say_all(self, reading: "asyncio.Task[None]") -> None:
        """Ends when every request is answered, with what the stream ends with."""
        await asyncio.wait([reading])
        if self._finishes_with is not None:
            await self.waits_over()
            raise self._finishes_with
        if not reading.cancelled() and reading.exception() is None:
            await self.waits_over()
        await reading

    async def _read(self, read: Callable[[], Awaitable[Any]]) -> None:
        while self._finishes_with is None:
            request = await read()
            if request is grpc.aio.EOF:
                return
            if request.number <= self._last_number:
                raise InvalidField(
                    field="number",
                    value=request.number,
                    limit=f"greater than {self._last_number}",
                    remedy="number the requests of a stream from 1 on",
                )
            self._last_number = request.number
            self._is_serving = True
            await self._serve(request)
            self._is_serving = False

    async def _serve(self, request: pb.ConverseRequest) -> None:
        if self.session.ended:
            raise SessionUnknown(self.session.cause)
        kind = request.WhichOneof("call")
        if kind is None:
            unknown = InvalidField(
                field="call",
                value="empty",
                limit="one of the calls of ConverseRequest",
                remedy="set it, or update the service",
            )
            self.refuse(request.number, unknown)
            return
        if self._gate.refusal is not None:
            # Not answered: the next process will be asked again.
            raise self._gate.refusal
        await self.responding[kind](request.number, getattr(request, kind))


async def _at_once() -> None:
    pass
