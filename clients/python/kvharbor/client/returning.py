"""Brings a session back when the service's process has ended, and into a new epoch when its state is gone [C11].

A thread watches the side socket, so that an idle worker comes back too. Old side sockets stay open until the next
process has been told everything: whoever closes first loses the session.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import grpc

from kvharbor.client import calls, channel, holdings
from kvharbor.client.address import Address
from kvharbor.client.calls import Call
from kvharbor.client.conversation import Conversation
from kvharbor.client.errors import (
    DeadlineExceeded,
    DescriptorsExhausted,
    HarborError,
    InsufficientMemory,
    PoolNotFound,
    PoolSizeMismatch,
    ServiceBug,
    ServiceUnreachable,
    SessionLost,
    StaleEpoch,
    Unavailable,
)
from kvharbor.client.holdings import HeldPool, Telling
from kvharbor.client.memory import PoolMemory
from kvharbor.client.options import Options
from kvharbor.client.side import Session, SideSocket
from kvharbor.client.standing import Standing
from kvharbor.v1 import side_pb2

PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
ATTEMPT_S = 2.0
"""Of one call to a process that may have ended again; it is repeated as long as that has not."""

T = TypeVar("T")


class Host(Protocol):
    """The link of either client, as far as bringing it back needs it. `atomically` changes it between its calls."""

    address: Address
    options: Options
    standing: Standing
    side: SideSocket | None
    session: Session | None

    @property
    def stream(self) -> Conversation:
        """Its stream of calls."""

    @property
    def pools(self) -> dict[str, Any]:
        """The open pools by id."""

    def atomically(self, change: Callable[[], T]) -> T:
        """Runs `change` while no call is taken in, and wakes those that wait."""

    def ask_user(self, callback: Callable[..., Any], *arguments: object) -> None:
        """Calls `callback` where the caller of `connect` expects it, and waits for it."""


class Returning:
    """Watches one link's side socket in a thread, and brings the link back whenever that ends."""

    def __init__(self, link: Host) -> None:
        self._link = link
        self._stopped = threading.Event()
        self._sides = [] if link.side is None else [link.side]
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to watch, if there is a side socket."""
        if self._sides:
            arguments = (weakref.ref(self), self._sides[0])
            self._thread = threading.Thread(target=_watch, args=arguments, name="kvharbor-side", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the side sockets, and with them the session and the watching."""
        self._stopped.set()
        for side in [*self._sides]:
            side.end()

    def join(self) -> None:
        """Waits until the watching has ended, unless it is what calls."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(ATTEMPT_S)

    def next_side(self) -> SideSocket | None:
        """Brings the link back after its side socket has ended; returns the next one, None if there is none."""
        link = self._link
        if not self._stopped.is_set():
            link.atomically(link.standing.leave)
        try:
            while not self._stopped.is_set():
                if (side := self._come_back()) is not None:
                    self._close_all_but(side)
                    return side
        except HarborError as failure:
            self._end(failure)
        except Exception as failure:  # what on_epoch raises, or a bug here: calls must not wait for ever
            broken = ServiceBug(f"cannot go on with the session: {failure!r}")
            broken.__cause__ = failure
            self._end(broken)
        return None

    def _end(self, cause: HarborError) -> None:
        link = self._link

        def end() -> None:
            link.standing.end(cause)
            link.stream.void(cause)

        link.atomically(end)

    def close(self) -> None:
        """Closes every side socket but the link's own, which it closes itself."""
        self._close_all_but(self._link.side)

    def _come_back(self) -> SideSocket | None:
        """Returns the side socket on which the next process knows everything, or None to try again."""
        side = self._connected()
        if side is None:
            return None
        try:
            session = side.hello(self._link.options.hello(self._resume()), patient=True)
        except StaleEpoch as stale:
            return self._begin_epoch(stale.metadata.get("currentEpoch", ""))
        except (SessionLost, Unavailable, DescriptorsExhausted) as failure:
            if side.refused:
                self._sides.remove(side)
                side.close()
                if isinstance(failure, SessionLost):
                    raise
            # Ended again, or about to. What was not refused may be known already: it stays open like the others.
            self._stopped.wait(PAUSE_S)
            return None
        return side if self._told(side, session) else None

    def _connected(self) -> SideSocket | None:
        path = self._link.address.side_path or ""
        try:
            side = SideSocket.connect(path, timeout_s=ATTEMPT_S)
        except (DeadlineExceeded, OSError):  # a full backlog; no descriptor left
            self._stopped.wait(PAUSE_S)
            return None
        except ServiceUnreachable as nobody:
            # The listener belongs to what keeps the service's state. Where it is gone, so is the session.
            if self._link.options.on_epoch is None:
                raise SessionLost(
                    f"the service at {self._link.address.target} has ended, and the session with it: connect again"
                ) from nobody
            self._link.atomically(self._link.standing.desert)
            self._stopped.wait(MAX_PAUSE_S)
            return None
        self._sides.append(side)
        if self._stopped.is_set():
            side.end()
        return side

    def _resume(self) -> side_pb2.Resume:
        session = self._link.session
        assert session is not None
        return side_pb2.Resume(token=session.resume_token, epoch=session.epoch)

    def _told(self, side: SideSocket, session: Session) -> bool:
        """Tells the process behind `side` what is held; False when it has ended on the way."""
        link = self._link

        def snapshot() -> tuple[list[Telling], list[Call[Any]]]:
            link.standing.begin_return()
            if not session.token:
                return [], []
            link.stream.replaced()
            return holdings.tellings(link.pools, session.opened_pool_ids), holdings.releases(link.pools)

        def arrive() -> None:
            holdings.settle(link.pools)
            link.side, link.session = side, session
            link.standing.arrive()
            link.stream.returned()

        tellings, releases = link.atomically(snapshot)
        try:
            with self._calling(side, session) as send:
                for telling in tellings:
                    self._tell(telling, send)
                for call in releases:
                    send(call)
        except SessionLost:
            if not side.lost:
                raise
            link.atomically(link.standing.leave)
            return False
        link.atomically(arrive)
        return True

    def _tell(self, telling: Telling, send: Callable[[Call[Any]], Any]) -> None:
        try:
            reply = send(Call("Resume", telling.request))
        except PoolNotFound as failure:
            gone = failure
            self._link.atomically(lambda: telling.refused(gone))
        else:
            self._link.atomically(lambda: telling.told(reply))

    def _begin_epoch(self, new_epoch: str) -> SideSocket:
        """Lets go of all that is of the old epoch, and returns the side socket of a session in the new one."""
        link, session = self._link, self._link.session
        assert session is not None
        on_epoch = link.options.on_epoch
        if on_epoch is None:
            raise SessionLost(
                f"the service at {link.address.target} was replaced by one of another epoch ({new_epoch}, was "
                f"{session.epoch}), and the session has ended: connect again"
            )

        def begin() -> None:
            link.standing.begin_epoch()
            link.stream.void(holdings.void(link.pools, session.epoch))

        link.atomically(begin)
        link.ask_user(on_epoch, session.epoch, new_epoch)
        pause_s, until_s = PAUSE_S, time.monotonic() + channel.OPEN_POOL_TIMEOUT_S
        while True:
            pools: list[HeldPool] = [*link.pools.values()]
            for pool in pools:
                pool.memory.vacate()
            self._close_all_but(None)
            try:
                return self._begun(pools)
            except (Unavailable, SessionLost, InsufficientMemory, DescriptorsExhausted):
                # Others may still have the old memory mapped.
                if self._stopped.is_set() or time.monotonic() > until_s:
                    raise
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _begun(self, pools: list[HeldPool]) -> SideSocket:
        """Opens a session with the pools, their new memory in the place of the old."""
        link = self._link
        options, address = link.options, link.address
        side, session = SideSocket.open(
            address.side_path or "", options.hello(), timeout_s=options.timeout_s, service=address.text
        )
        self._sides.append(side)
        if self._stopped.is_set():
            side.end()
        with self._calling(side, session) as send:
            moves = {pool.id: self._reopened(pool, side, send) for pool in pools}
        self._tell_moved(pools)

        def arrive() -> None:
            holdings.rekeyed(link.pools, {old_id: memory.pool_id for old_id, memory in moves.items()})
            link.side, link.session = side, session
            link.standing.arrive()
            link.stream.returned()

        link.atomically(arrive)
        return side

    def _reopened(self, pool: HeldPool, side: SideSocket, send: Callable[[Call[Any]], Any]) -> PoolMemory:
        layout, devices = pool.memory.descriptor.layout, pool.memory.devices
        size_bytes = pool.asked_bytes or pool.memory.descriptor.size_bytes
        try:
            reply = send(calls.open_pool(pool.name, layout, size_bytes, devices))
        except PoolSizeMismatch:
            # Another session was first, and had asked for the same memory by another number.
            reply = send(calls.open_pool(pool.name, layout, 0, devices))
        memory = pool.memory.replaced(side, reply.pool.pool_id)
        pool.memory = memory
        return memory

    def _tell_moved(self, pools: list[HeldPool]) -> None:
        """Has the engine take new views of the pools that have other addresses, before any call on them is made."""
        on_moved = self._link.options.on_moved
        if on_moved is not None:
            for pool in pools:
                if pool.memory.moves:
                    self._link.ask_user(on_moved, pool)

    @contextmanager
    def _calling(self, side: SideSocket, session: Session) -> Iterator[Callable[[Call[Any]], Any]]:
        """Yields what sends calls of `session` to the process behind `side`, and repeats them while that lives."""
        address, metadata = self._link.address, channel.session_metadata(session)

        def send(call: Call[Any]) -> Any:
            method = stubs.unary[call.method]
            while True:
                try:
                    return method(call.request, timeout=ATTEMPT_S, metadata=metadata, wait_for_ready=True)
                except grpc.RpcError as failure:
                    if side.lost:
                        raise SessionLost("the service's process has ended again") from None
                    error = channel.call_error(failure, address, closed=self._stopped.is_set(), timeout_s=ATTEMPT_S)
                    if not isinstance(error, Unavailable):
                        raise error from None
                self._stopped.wait(PAUSE_S)

        # A channel of its own: it connects at once, and nobody else's calls are on it.
        with grpc.insecure_channel(address.target, options=channel.OPTIONS) as own:
            stubs = channel.Stubs(own)
            yield send

    def _close_all_but(self, kept: SideSocket | None) -> None:
        others = [side for side in self._sides if side is not kept]
        self._sides = [side for side in self._sides if side is kept]
        for side in others:
            side.close()


def _watch(reference: "weakref.ref[Returning]", side: SideSocket | None) -> None:
    """Runs in the thread, and keeps nothing alive that its owner has forgotten."""
    while side is not None:
        side.wait_for_end()
        returning = reference()
        if returning is None:
            side.close()
            return
        side = returning.next_side()
        if side is None:
            returning.close()
        del returning
