"""The asyncio way to the service: a channel, and the session's side socket where there is one."""

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from kvharbor.client import answers, channel
from kvharbor.client.address import Address
from kvharbor.client.aio.recording import Recording
from kvharbor.client.calls import Call, Repeat
from kvharbor.client.conversation import Silence
from kvharbor.client.errors import DeadlineExceeded, HarborClosed, HarborError, SessionLost, Unavailable
from kvharbor.client.options import Options
from kvharbor.client.results import Progress, WatchEvent
from kvharbor.client.returning import Returning
from kvharbor.client.side import Session, SideSocket
from kvharbor.client.standing import Standing, State
from kvharbor.v1 import cache_service_pb2 as cache

if TYPE_CHECKING:
    from kvharbor.client.aio.pool import Pool

Reply = TypeVar("Reply")
T = TypeVar("T")


class Link:
    """Runs calls on the event loop that opened it; a fork must not use it. Made by `open`.

    What is held here, the sequences of `pools`, changes on the loop only, also when the service's next process is
    told of it [C11]: between two awaits it stays as it is.
    """

    def __init__(self, address: Address, options: Options, side: SideSocket | None, session: Session | None) -> None:
        self.address = address
        self.options = options
        self.session = session
        self.side = side
        self.pools: dict[str, Pool] = {}
        self.standing = Standing(address.target)
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._undoing: set[asyncio.Task[None]] = set()
        self._stop_waiting: Callable[[], None] = lambda: None
        self._channel = grpc.aio.insecure_channel(address.target, options=channel.OPTIONS)
        self._stubs = channel.Stubs(self._channel)
        self.stream = Silence()
        self._returning = Returning(self)
        self._returning.start()

    @classmethod
    async def open(cls, address: Address, options: Options) -> "Link":
        """Opens the session first, where the address gives one, and the channel after it."""
        options.checked()
        if address.side_path is None:
            return cls(address, options, None, None)
        opening = asyncio.ensure_future(
            asyncio.to_thread(
                SideSocket.open,
                address.side_path,
                options.hello(),
                timeout_s=options.timeout_s,
                service=address.text,
            )
        )
        try:
            side, session = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread cannot be stopped: a session that it still opens is ended as soon as it is there.
            opening.add_done_callback(_close_unwanted)
            raise
        return cls(address, options, side, session)

    async def run(
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
        is sent, each time. A call that is cancelled or out of time is undone, as far as the service can be reached:
        its reply may be lost, but what it took must not be.
        """
        self.require_open()
        channel.require_leader(self.options)
        timeout_s = (self.options.timeout_s if timeout_s is None else timeout_s) + call.wait_s
        until_s = time.monotonic() + timeout_s
        tries = channel.Tries(call, has_side=self.side is not None, away_wait_s=self.options.away_wait_s)
        epochs = self.standing.epochs
        with tries.telling():
            while True:
                await self._wait_until_settled(epochs, until_s, even_away=here is not None)
                if here is not None and self.standing.state is State.AWAY:
                    return here()
                if sending is not None:
                    sending()
                    tries.may_have_effect = True
                life = self.standing.life
                try:
                    reply = await self._send(call, until_s - time.monotonic())
                except grpc.RpcError as failure:
                    error = self.error(failure, timeout_s)
                    if isinstance(error, DeadlineExceeded):
                        self._undo_later(call)
                    if isinstance(error, Unavailable) and not isinstance(error, DeadlineExceeded):
                        await self._wait_for_news(life, tries.pause_s(error, until_s))
                    again = tries.again(error, to_another=self.standing.news_since(life))
                    if time.monotonic() >= until_s or not again:
                        raise error from None
                    continue
                except asyncio.CancelledError:
                    self._undo_later(call)
                    if self.closed and not _task_is_cancelled():
                        raise HarborClosed("the harbor was closed while the call was under way") from None
                    raise
                if self.standing.life == life or call.repeat is Repeat.NEVER:
                    return take(reply)
                # What answered has ended since, and its successor knows nothing of the call.
                tries.may_have_effect = True

    def watch(self, request: cache.WatchRequest) -> "Watch":
        """Opens a stream."""
        self.require_open()
        channel.require_leader(self.options)
        self.standing.require(self.standing.epochs)
        stream = self._stubs.cache.Watch(request, metadata=channel.session_metadata(self.session))
        return Watch(stream, self, request.start_revision)

    async def record(self, request: cache.RecordRequest) -> Recording:
        """Opens a recording, which has begun then."""
        self.require_open()
        channel.require_leader(self.options)
        self.standing.require(self.standing.epochs)
        metadata = channel.session_metadata(self.session)
        return await Recording.begun(functools.partial(self._stubs.cache.Record, metadata=metadata), request, self)

    async def on_side(self, use: Callable[[SideSocket], T]) -> T:
        """Returns what `use` gets from the side socket in a thread, from the next one if that ends on the way."""
        self.require_session()
        until_s = time.monotonic() + self.options.timeout_s
        epochs = self.standing.epochs
        while True:
            await self._wait_until_settled(epochs, until_s)
            side, life = self.require_session(), self.standing.life
            try:
                return await asyncio.to_thread(use, side)
            except SessionLost:
                if time.monotonic() >= until_s:
                    raise
                await self._wait_for_news(life, self.options.timeout_s)

    def take_notices(self) -> list[str]:
        """Returns the pools that the service has noticed warm tasks of since the last call; none while it is away."""
        try:
            return self.require_session().take_notices()
        except SessionLost:
            self.standing.require(self.standing.epochs)
            return []

    async def wait_for_notice(self, timeout_s: float) -> None:
        """Waits until there may be a notice, the service has come back, or `timeout_s` is over."""
        side = self.require_session()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if not side.lost:
                    await self._wait_for_readable(side)
                else:
                    await self._wait_for(lambda: self.side is not side or self.standing.state is State.ENDED)

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

    def atomically(self, change: Callable[[], T]) -> T:
        """Runs `change` on the loop, for another thread, and wakes the calls that wait."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(self._change(change))
            except BaseException as failure:
                done.set_exception(failure)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:  # the loop is closed, and nobody calls any more
            run()
        return done.result()

    def ask_user(self, callback: Callable[..., Any], *arguments: object) -> None:
        """Calls `callback` on the loop, for another thread, and waits until what it returns is done."""

        async def asked() -> None:
            answer = callback(*arguments)
            if inspect.isawaitable(answer):
                await answer

        asyncio.run_coroutine_threadsafe(asked(), self._loop).result()

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

    async def close(self) -> None:
        """Ends session and channel; calls under way in other tasks end with an error."""
        self.closed = True
        self._change(lambda: self.standing.end(HarborClosed("the harbor was closed: connect again")))
        self._stop_waiting()
        if self._undoing:
            await asyncio.wait(self._undoing)
        self._returning.stop()
        await asyncio.to_thread(self._returning.join)
        if self.side is not None:
            self.side.close()
        if not self.forked:  # gRPC's threads are not there in a child
            await self._channel.close()

    def error(self, failure: grpc.RpcError, timeout_s: float | None) -> HarborError:
        """Returns the error of a failed call."""
        return self.standing.meant(channel.call_error(failure, self.address, closed=self.closed, timeout_s=timeout_s))

    async def _send(self, call: Call[Reply], timeout_s: float) -> Any:
        metadata = channel.session_metadata(self.session)
        # What can be sent once only is not sent on a connection that is still to be made anew.
        patient = call.repeat is not Repeat.ALWAYS and self.side is not None
        method = self._stubs.unary[call.method]
        return await method(call.addressed(), timeout=max(timeout_s, 0.0), metadata=metadata, wait_for_ready=patient)

    async def _wait_until_settled(self, epochs: int, until_s: float, *, even_away: bool = False) -> None:
        if not self.standing.settled(even_away=even_away):
            left_s = until_s - time.monotonic()
            wait_s = left_s if self.options.away_wait_s is None else min(left_s, self.options.away_wait_s)
            try:
                async with asyncio.timeout(wait_s):
                    await self._wait_for(
                        lambda: self.standing.epochs != epochs or self.standing.settled(even_away=even_away)
                    )
            except TimeoutError:
                raise self.standing.still_away() from None
        self.standing.require(epochs)

    async def _wait_for_news(self, life: int, timeout_s: float) -> None:
        """Waits until the service has gone away since `life`, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wait_for(lambda: self.standing.news_since(life))

    async def _wait_for(self, done: Callable[[], bool]) -> None:
        while not done():
            await self._changed.wait()

    def _change(self, change: Callable[[], T]) -> T:
        changed = change()
        # Those who wait look again; who comes now waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()
        return changed

    async def _wait_for_readable(self, side: SideSocket) -> None:
        """Waits until the side socket may have a notice or has ended, for one task at a time."""
        try:
            sources = side.notice_sources
        except ValueError:  # closed, as an answer did not come in time
            return
        readable: asyncio.Future[None] = self._loop.create_future()

        def stop() -> None:
            # Before the descriptors are closed: the loop may see their numbers again.
            self._stop_waiting = lambda: None
            for source in sources:
                self._loop.remove_reader(source)
            if not readable.done():
                readable.set_result(None)

        self._stop_waiting = stop
        for source in sources:
            self._loop.add_reader(source, stop)
        try:
            await readable
        finally:
            if self._stop_waiting is stop:
                stop()

    def _undo_later(self, call: Call[Any]) -> None:
        undo = None if call.undo is None or self.closed else call.undo()
        if undo is None:
            return
        # In a task of its own, as the caller's is being cancelled; the set keeps it alive until it is done.
        task = asyncio.ensure_future(self._undo(undo))
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def _undo(self, undo: Call[Any]) -> None:
        # Best effort: where this fails too, the end of the session gives everything back.
        with contextlib.suppress(grpc.RpcError):
            await self._send(undo, channel.UNDO_TIMEOUT_S)

    def __del__(self) -> None:
        # Forgotten without a close: the thread that watches the side socket has no other way to learn it.
        if "_returning" in vars(self):
            self._returning.stop()


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
