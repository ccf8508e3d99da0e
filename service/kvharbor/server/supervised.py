"""The child's side of being supervised: what it keeps for its successors, tells, and is told."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import structlog

from kvharbor.server.control import Channel
from kvharbor.server.keeper import Kept, Store

log = structlog.get_logger(__name__)


class Supervised:
    """The supervisor, as its child sees it. It is a Keeper [S15]; made by `wait_for_start`."""

    def __init__(self, channel: Channel, inherited: Store, after: str) -> None:
        self._channel = channel
        self._inherited = inherited
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

    def ask_upgrade(self) -> None:
        """Asks for a successor; this process is told to leave once one could start."""
        self._tell({"upgrade": True})

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
        leave()

    def _tell(self, message: dict[str, Any], fds: tuple[int, ...] = (), *, flags: int = 0) -> None:
        try:
            self._channel.send(message, fds, flags=flags)
        except BlockingIOError:
            raise
        except OSError:
            _die()


def _die() -> None:
    """Ends the process at once: what nobody keeps must not be promised to anybody [S20]."""
    log.critical("the supervisor is gone, the process ends")
    os._exit(1)
