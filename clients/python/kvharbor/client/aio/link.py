"""The asyncio way to the service: a channel, and the session's side socket where there is one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from kvharbor.client import answers, channel
from kvharbor.client.address import Address
from kvharbor.client.calls import Call
from kvharbor.client.errors import DeadlineExceeded, HarborClosed, HarborError
from kvharbor.client.results import Progress, WatchEvent
from kvharbor.client.side import Session, SideSocket
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import cache_service_pb2_grpc, pool_service_pb2_grpc

Reply = TypeVar("Reply")


class Link:
    """Runs calls on the event loop that opened it; a fork must not use it. Made by `open`."""

    def __init__(self, address: Address, side: SideSocket | None, session: Session | None, *, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.session = session
        self.side = side
        self.closed = False
        self._undoing: set[asyncio.Task[None]] = set()
        self._stop_waiting: Callable[[], None] = lambda: None
        self._metadata = channel.session_metadata(session.token if session else "")
        self._channel = grpc.aio.insecure_channel(address.target, options=channel.OPTIONS)
        self._cache: Any = cache_service_pb2_grpc.CacheServiceStub(self._channel)
        self._methods = channel.unary_methods([self._cache, pool_service_pb2_grpc.PoolServiceStub(self._channel)])

    @classmethod
    async def open(
        cls, address: Address, *, client_name: str, timeout_s: float, accepts_warm_tasks: bool = False
    ) -> "Link":
        """Opens the session first, where the address gives one, and the channel after it."""
        channel.positive_timeout(timeout_s)
        if address.side_path is None:
            return cls(address, None, None, timeout_s=timeout_s)
        opening = asyncio.ensure_future(
            asyncio.to_thread(
                SideSocket.open,
                address.side_path,
                client_name=client_name,
                timeout_s=timeout_s,
                accepts_warm_tasks=accepts_warm_tasks,
            )
        )
        try:
            side, session = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread cannot be stopped: a session that it still opens is ended as soon as it is there.
            opening.add_done_callback(_close_unwanted)
            raise
        return cls(address, side, session, timeout_s=timeout_s)

    async def run(self, call: Call[Reply], timeout_s: float | None = None) -> Reply:
        """Sends a call and returns its reply, or raises the HarborError that it failed with.

        A call that is cancelled or out of time is undone, as far as the service can be reached: its reply may
        be lost, but what it took must not be.
        """
        self.require_open()
        timeout_s = (self.timeout_s if timeout_s is None else timeout_s) + call.wait_s
        try:
            reply = await self._methods[call.method](call.request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as failure:
            error = self.error(failure, timeout_s)
            if isinstance(error, DeadlineExceeded):
                self._undo_later(call)
            raise error from None
        except asyncio.CancelledError:
            self._undo_later(call)
            if self.closed and not _task_is_cancelled():
                raise HarborClosed("the harbor was closed while the call was under way") from None
            raise
        return cast(Reply, reply)

    def watch(self, request: cache.WatchRequest) -> "Watch":
        """Opens a stream."""
        self.require_open()
        return Watch(self._cache.Watch(request, metadata=self._metadata), self, request.start_revision)

    @property
    def session_lives(self) -> bool:
        """Whether there is a session that has not ended, as far as is known here; asks nobody."""
        return not self.closed and self.side is not None and not self.side.lost

    def require_open(self) -> None:
        """Raises HarborClosed after close, and in a fork of the process that opened the session."""
        if self.closed:
            raise HarborClosed("the harbor is closed: connect again")
        if self.side is not None:
            self.side.require_same_process()

    def require_session(self) -> SideSocket:
        """Returns the side socket, or raises SessionRequired over TCP."""
        self.require_open()
        if self.side is None:
            raise channel.session_required(self.address)
        return self.side

    async def wait_for_notice(self) -> None:
        """Waits until the side socket may have a notice or has ended, for one task at a time."""
        loop = asyncio.get_running_loop()
        try:
            sources = self.require_session().notice_sources
        except ValueError:  # closed, as an answer did not come in time
            return
        readable: asyncio.Future[None] = loop.create_future()

        def stop() -> None:
            # Before the descriptors are closed: the loop may see their numbers again.
            self._stop_waiting = lambda: None
            for source in sources:
                loop.remove_reader(source)
            if not readable.done():
                readable.set_result(None)

        self._stop_waiting = stop
        for source in sources:
            loop.add_reader(source, stop)
        try:
            await readable
        finally:
            if self._stop_waiting is stop:
                stop()

    async def close(self) -> None:
        """Ends session and channel; calls under way in other tasks end with an error."""
        self.closed = True
        self._stop_waiting()
        if self._undoing:
            await asyncio.wait(self._undoing)
        if self.side is not None:
            self.side.close()
        await self._channel.close()

    def error(self, failure: grpc.RpcError, timeout_s: float | None) -> HarborError:
        """Returns the error of a failed call."""
        return channel.call_error(failure, self.address, side=self.side, closed=self.closed, timeout_s=timeout_s)

    def _undo_later(self, call: Call[Reply]) -> None:
        if call.undo is None or self.closed:
            return
        # In a task of its own, as the caller's is being cancelled; the set keeps it alive until it is done.
        task = asyncio.ensure_future(self._undo(call.undo()))
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def _undo(self, undo: Call[Any]) -> None:
        # Best effort: where this fails too, the end of the session gives everything back.
        with contextlib.suppress(grpc.RpcError):
            await self._methods[undo.method](undo.request, timeout=channel.UNDO_TIMEOUT_S, metadata=self._metadata)


class Watch:
    """A stream of events; iterate it with `async for`, and close it (or leave its `async with`) when done.

    `revision` is the last one that is complete: a later watch may start from it.
    """

    def __init__(self, stream: Any, link: Link, revision: int) -> None:
        self._stream = stream
        self._link = link
        self._closed = False
        self.revision = revision

    async def __aiter__(self) -> AsyncIterator[WatchEvent]:
        """Yields events until the watch is closed; raises the HarborError that ends it otherwise."""
        try:
            async for reply in self._stream:
                for event in answers.watch_events(reply):
                    if isinstance(event, Progress):
                        self.revision = event.revision
                    yield event
        except grpc.RpcError as failure:
            if not self._closed:
                raise self._link.error(failure, None) from None
        except asyncio.CancelledError:
            if not self._closed or _task_is_cancelled():
                raise

    async def __aenter__(self) -> "Watch":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stream, also for a task that waits in it."""
        self._closed = True
        self._stream.cancel()


def _task_is_cancelled() -> bool:
    """Tells a cancelled task from a cancelled call: closing a channel raises the same error in both."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _close_unwanted(opening: "asyncio.Future[tuple[SideSocket, Session]]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()
