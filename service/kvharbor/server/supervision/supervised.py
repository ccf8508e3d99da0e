"""The child's side of being supervised: what it keeps for its successors, tells, and is told."""

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import structlog

from kvharbor.server.errors import UpgradeFailed
from kvharbor.server.supervision.control import Channel
from kvharbor.server.supervision.keeper import Kept, Store

log = structlog.get_logger(__name__)

_FULL_PAUSE_S = 0.01


class Supervised:
    """The supervisor, as its child sees it. It is a Keeper [S15]; made by `wait_for_start`."""

    def __init__(self, channel: Channel, inherited: Store, after: str) -> None:
        self._channel = channel
        self._inherited = inherited
        self._verdict: asyncio.Future[str] | None = None
        self.after = after

    @classmethod
    def wait_for_start(cls, channel: Channel) -> "Supervised | None":
        """Says that this process could start, and waits until it shall; None when the supervisor is gone."""
        channel.send({"standing_by": True})
        inherited = Store()
        while (received := channel.receive()) is not None:
            message, fds = received
            if "start" in message:
                return cls(channel, inherited, message["start"])
            inherited.take(message["kept"], message["meta"], fds)
        return None

    @property
    def kept(self) -> Mapping[str, Kept]:
        """As Keeper says."""
        return self._inherited.kept

    def hand_over(self, name: str) -> tuple[int, ...]:
        """As Keeper says; the supervisor has its own."""
        kept = self._inherited.kept[name]
        self._inherited.kept[name] = Kept(kept.meta)
        return kept.fds

    def keep(self, name: str, meta: dict[str, Any], fds: Iterable[int] = ()) -> None:
        """As Keeper says."""
        fds = tuple(fds)
        self._tell({"keep": name, "meta": meta}, fds)
        if fds:
            self._inherited.drop(name)
        self._inherited.take(name, meta, ())

    def drop(self, name: str) -> None:
        """As Keeper says."""
        self._tell({"drop": name})
        self._inherited.drop(name)

    def ready(self) -> None:
        """Tells that the service is usable."""
        self._tell({"ready": True})

    async def upgrade(self) -> None:
        """Asks for a successor, and returns once it could start: this process has been told to leave then.

        Raises UpgradeFailed when it does not start. A supervisor of an older version keeps silent instead.
        """
        if self._verdict is None:
            self._verdict = asyncio.get_running_loop().create_future()
            self._tell({"upgrade": True})
        if cause := await asyncio.shield(self._verdict):
            raise UpgradeFailed(cause)

    def alive(self) -> None:
        """Tells that the event loop runs. Never waits: a supervisor that is stopped misses nothing by it."""
        with contextlib.suppress(BlockingIOError):
            self._tell({"alive": True}, flags=socket.MSG_DONTWAIT)

    def listen(self, leave: Callable[[], None]) -> None:
        """Calls `leave` when this process shall make room: for a successor, or for nobody.

        Both are the same to it. What is kept stays kept, and the supervisor knows for whom.
        """
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._hear, leave)

    def _hear(self, leave: Callable[[], None]) -> None:
        try:
            received = self._channel.receive(flags=socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if received is None:
            _die()
        match received[0]:
            case {"upgrade_given_up": str(cause)}:
                self._decide(cause)
            case {"leave": _}:
                self._decide("")
                leave()

    def _decide(self, failure: str) -> None:
        """Tells those who wait for an upgrade what becomes of it."""
        if self._verdict is not None:
            self._verdict.set_result(failure)
            self._verdict = None

    def _tell(self, message: dict[str, Any], fds: tuple[int, ...] = (), *, flags: int = 0) -> None:
        while True:
            try:
                self._channel.send(message, fds, flags=flags)
            except BlockingIOError:
                raise
            except OSError as failure:
                if failure.errno != errno.ETOOMANYREFS:
                    _die()
                # Descriptors under way are bounded: as with a full socket, wait until the supervisor has read some.
                time.sleep(_FULL_PAUSE_S)
            else:
                return


def _die() -> NoReturn:
    """Ends the process at once: what nobody keeps must not be promised to anybody [S20]."""
    log.critical("the supervisor is gone, the process ends")
    os._exit(1)
