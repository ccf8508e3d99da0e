"""The synchronous way to the service: a channel, and the session's side socket where there is one."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import grpc

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
    """Runs calls. Threads may share it; a fork must not use it."""

    def __init__(
        self, address: Address, *, client_name: str, timeout_s: float, accepts_warm_tasks: bool = False
    ) -> None:
        self.address = address
        self.timeout_s = channel.positive_timeout(timeout_s)
        self.session: Session | None = None
        self.side: SideSocket | None = None
        self.closed = False
        if address.side_path is not None:
            self.side, self.session = SideSocket.open(
                address.side_path,
                client_name=client_name,
                timeout_s=timeout_s,
                accepts_warm_tasks=accepts_warm_tasks,
            )
        self._metadata = channel.session_metadata(self.session.token if self.session else "")
        self._channel = grpc.insecure_channel(address.target, options=channel.OPTIONS)
        self._cache = cache_service_pb2_grpc.CacheServiceStub(self._channel)
        self._methods = channel.unary_methods([self._cache, pool_service_pb2_grpc.PoolServiceStub(self._channel)])

    def run(self, call: Call[Reply], timeout_s: float | None = None) -> Reply:
        """Sends a call and returns its reply, or raises the HarborError that it failed with.

        A call that is out of time is undone, as far as the service can be reached: its reply may be lost, but
        what it took must not be.
        """
        self.require_open()
        timeout_s = (self.timeout_s if timeout_s is None else timeout_s) + call.wait_s
        try:
            reply = self._methods[call.method](call.request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as failure:
            error = self.error(failure, timeout_s)
            if isinstance(error, DeadlineExceeded):
                self._undo(call)
            raise error from None
        except ValueError:
            # What gRPC says when another thread has closed the channel in the meantime.
            self.require_open()
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

    def close(self) -> None:
        """Ends session and channel; calls under way in other threads end with an error."""
        self.closed = True
        if self.side is not None:
            self.side.close()
        self._channel.close()

    def error(self, failure: grpc.RpcError, timeout_s: float | None) -> HarborError:
        """Returns the error of a failed call."""
        return channel.call_error(failure, self.address, side=self.side, closed=self.closed, timeout_s=timeout_s)

    def _undo(self, call: Call[Reply]) -> None:
        if call.undo is None:
            return
        undo = call.undo()
        # Best effort: where this fails too, the end of the session gives everything back.
        with contextlib.suppress(grpc.RpcError):
            self._methods[undo.method](undo.request, timeout=channel.UNDO_TIMEOUT_S, metadata=self._metadata)


class Watch:
    """A stream of events; iterate it, and close it (or leave its `with`) when done.

    `revision` is the last one that is complete: a later watch may start from it.
    """

    def __init__(self, stream: Any, link: Link, revision: int) -> None:
        self._stream = stream
        self._link = link
        self._closed = False
        self.revision = revision

    def __iter__(self) -> Iterator[WatchEvent]:
        """Yields events until the watch is closed; raises the HarborError that ends it otherwise."""
        try:
            for reply in self._stream:
                for event in answers.watch_events(reply):
                    if isinstance(event, Progress):
                        self.revision = event.revision
                    yield event
        except grpc.RpcError as failure:
            if not self._closed:
                raise self._link.error(failure, None) from None

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stream, also for a thread that waits in it."""
        self._closed = True
        self._stream.cancel()
