"""The synchronous way to the service: a channel, and the session's side socket where there is one."""

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from kvharbor.client import answers, channel
from kvharbor.client.address import Address
from kvharbor.client.calls import Call, Repeat
from kvharbor.client.errors import DeadlineExceeded, HarborClosed, HarborError, SessionLost, Unavailable
from kvharbor.client.options import Options
from kvharbor.client.recording import Recording
from kvharbor.client.returning import Returning
from kvharbor.client.side import Session, SideSocket
from kvharbor.client.standing import Standing, State
from kvharbor.client.stream import Stream
from kvharbor.client.watch import Watch
from kvharbor.v1 import cache_service_pb2 as cache

if TYPE_CHECKING:
    from kvharbor.client.pool import Pool

Reply = TypeVar("Reply")
T = TypeVar("T")


class Link:
    """Runs calls. Threads may share it; a fork must not use it.

    `guard` keeps what is held here, the sequences of `pools`, as it is: answers are taken in under it, and while
    the service's next process is told of it [C11].
    """

    def __init__(self, address: Address, options: Options) -> None:
        self.address = address
        self.options = options.checked()
        self.session: Session | None = None
        self.side: SideSocket | None = None
        self.pools: dict[str, Pool] = {}
        self.standing = Standing(address.target)
        self.closed = False
        self._changed = threading.Condition()
        _links.add(self)
        if address.side_path is not None:
            self.side, self.session = SideSocket.open(
                address.side_path, options.hello(), timeout_s=options.timeout_s, service=address.text
            )
        self._channel = grpc.insecure_channel(address.target, options=channel.OPTIONS)
        self._stubs = channel.Stubs(self._channel)
        self.stream = Stream(self)
        self._returning = Returning(self)
        self._returning.start()

    def run(
        self,
        call: Call[Reply],
        timeout_s: float | None = None,
        *,
        take: Callable[[Reply], T] = answers.as_it_is,
        here: Callable[[], T] | None = None,
        sending: Callable[[], None] | None = None,
    ) -> T:
        """Sends a call and returns what `take` makes of its reply, or raises the HarborError that it failed with.

        While the service is away the call waits for it, unless `here` can do without. `sending` is called before it
        is sent, each time, all three under `guard`. A call that is out of time is undone, as far as the service can
        be reached: its reply may be lost, but what it took must not be.
        """
        self.require_open()
        channel.require_leader(self.options)
        timeout_s = (self.options.timeout_s if timeout_s is None else timeout_s) + call.wait_s
        until_s = time.monotonic() + timeout_s
        tries = channel.Tries(call, has_side=self.side is not None, away_wait_s=self.options.away_wait_s)
        epochs = self.standing.epochs
        with tries.telling():
            while True:
                with self._changed:
                    self.wait_until_settled(epochs, until_s, even_away=here is not None)
                    if here is not None and self.standing.state is State.AWAY:
                        return here()
                    if sending is not None:
                        sending()
                        tries.may_have_effect = True
                    life, metadata = self.standing.life, channel.session_metadata(self.session)
                try:
                    reply = self._send(call, until_s - time.monotonic(), metadata)
                except grpc.RpcError as failure:
                    error = self.error(failure, timeout_s)
                    if isinstance(error, DeadlineExceeded):
                        self._undo(call)
                    if isinstance(error, Unavailable) and not isinstance(error, DeadlineExceeded):
                        self._wait_for_news(life, tries.pause_s(error, until_s))
                    again = tries.again(error, to_another=self.standing.news_since(life))
                    if time.monotonic() >= until_s or not again:
                        raise error from None
                    continue
                with self._changed:
                    if self.standing.life == life or call.repeat is Repeat.NEVER:
                        return take(reply)
                # What answered has ended since, and its successor knows nothing of the call.
                tries.may_have_effect = True

    def watch(self, request: cache.WatchRequest) -> Watch:
        """Opens a stream."""
        self.require_open()
        channel.require_leader(self.options)
        self.standing.require(self.standing.epochs)
        stream = self._stubs.cache.Watch(request, metadata=channel.session_metadata(self.session))
        return Watch(stream, self, request.start_revision)

    def record(self, request: cache.RecordRequest) -> Recording:
        """Opens a recording, which has begun then."""
        self.require_open()
        channel.require_leader(self.options)
        self.standing.require(self.standing.epochs)
        metadata = channel.session_metadata(self.session)
        return Recording(functools.partial(self._stubs.cache.Record, metadata=metadata), request, self)

    def converse(self, requests: Iterator[Any]) -> Any:
        """Opens the session's stream, on which `requests` are sent; for the `stream`."""
        return self._stubs.stream.Converse(
            requests, metadata=channel.session_metadata(self.session), wait_for_ready=True
        )

    def on_side(self, use: Callable[[SideSocket], T]) -> T:
        """Returns what `use` gets from the side socket, from the next one if that ends on the way."""
        self.require_session()
        until_s = time.monotonic() + self.options.timeout_s
        epochs = self.standing.epochs
        while True:
            with self._changed:
                self.wait_until_settled(epochs, until_s)
                side, life = self.require_session(), self.standing.life
            try:
                return use(side)
            except SessionLost:
                if time.monotonic() >= until_s:
                    raise
                self._wait_for_news(life, self.options.timeout_s)

    def take_notices(self) -> list[str]:
        """Returns the pools that the service has noticed warm tasks of since the last call; none while it is away."""
        try:
            return self.require_session().take_notices()
        except SessionLost:
            self.standing.require(self.standing.epochs)
            return []

    def wait_for_notice(self, timeout_s: float) -> None:
        """Waits until there may be a notice, the service has come back, or `timeout_s` is over."""
        side = self.require_session()
        if not side.lost:
            side.wait_for_notice(timeout_s)
            return
        with self._changed:
            self._changed.wait_for(lambda: self.side is not side or self.standing.state is State.ENDED, timeout_s)

    @property
    def session_lives(self) -> bool:
        """Whether there is a session that has not ended, as far as is known here; asks nobody."""
        return self.side is not None and self.standing.state is not State.ENDED and not self.standing.deserted

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened the session."""
        return self.side is not None and self.side.forked

    @property
    def leads(self) -> bool:
        """Whether the session is this process's own, and not one that it has joined."""
        return self.session is not None and bool(self.session.token)

    @property
    def guard(self) -> AbstractContextManager[object]:
        """What no answer is taken in under, and no other thread is in at the time."""
        return self._changed

    def atomically(self, change: Callable[[], T]) -> T:
        """Runs `change` under the guard and wakes the calls that wait."""
        with self._changed:
            changed = change()
            self._changed.notify_all()
        self.stream.run_later()
        return changed

    def wait_for(self, seen: Callable[[], bool], timeout_s: float) -> bool:
        """Waits, under the guard, until something is so, or for so long; returns whether it is."""
        return self._changed.wait_for(seen, timeout_s)

    def wake(self) -> None:
        """Has those who wait look again, under the guard."""
        self._changed.notify_all()

    def ask_user(self, callback: Callable[..., Any], *arguments: object) -> None:
        """Calls `callback`, in the thread that has found the new epoch."""
        callback(*arguments)

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
        cause = HarborClosed("the harbor was closed: connect again")

        def end() -> None:
            self.standing.end(cause)
            self.stream.void(cause)

        self.atomically(end)
        self._returning.stop()
        self._returning.join()
        self.stream.close()
        if self.side is not None:
            self.side.close()
        if not self.forked:  # gRPC's threads are not there in a child
            self._channel.close()

    def error(self, failure: grpc.RpcError, timeout_s: float | None) -> HarborError:
        """Returns the error of a failed call."""
        return self.standing.meant(channel.call_error(failure, self.address, closed=self.closed, timeout_s=timeout_s))

    def _send(self, call: Call[Reply], timeout_s: float, metadata: Any) -> Any:
        # What can be sent once only is not sent on a connection that is still to be made anew.
        patient = call.repeat is not Repeat.ALWAYS and self.side is not None
        method = self._stubs.unary[call.method]
        try:
            return method(call.addressed(), timeout=max(timeout_s, 0.0), metadata=metadata, wait_for_ready=patient)
        except ValueError:
            # What gRPC says when another thread has closed the channel in the meantime.
            self.require_open()
            raise

    def wait_until_settled(self, epochs: int, until_s: float, *, even_away: bool = False) -> None:
        """Waits, under the guard, until a call may be sent; raises what it fails with, ServiceAway included."""
        if not self.standing.settled(even_away=even_away):
            left_s = until_s - time.monotonic()
            wait_s = left_s if self.options.away_wait_s is None else min(left_s, self.options.away_wait_s)
            done = self._changed.wait_for(
                lambda: self.standing.epochs != epochs or self.standing.settled(even_away=even_away), wait_s
            )
            if not done:
                raise self.standing.still_away()
        self.standing.require(epochs)

    def _wait_for_news(self, life: int, timeout_s: float) -> None:
        """Waits until the service has gone away since `life`, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.standing.news_since(life), timeout_s)

    def _undo(self, call: Call[Any]) -> None:
        undo = None if call.undo is None else call.undo()
        if undo is None:
            return
        # Best effort: where this fails too, the end of the session gives everything back.
        with contextlib.suppress(grpc.RpcError):
            self._send(undo, channel.UNDO_TIMEOUT_S, channel.session_metadata(self.session))

    def __del__(self) -> None:
        # Forgotten without a close: the thread that watches the side socket has no other way to learn it.
        if "_returning" in vars(self):
            self._returning.stop()


_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


def _renew_locks() -> None:
    # A thread that is not there in the child may have held them.
    for link in list(_links):
        link._changed = threading.Condition()


os.register_at_fork(after_in_child=_renew_locks)
