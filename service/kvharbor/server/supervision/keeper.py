"""What outlives this process: named facts and file descriptors, kept by the supervisor and handed to the next child."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvharbor.server.supervision.control import Channel


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept under one name: facts as JSON has them, and file descriptors, which belong to the keeper."""

    meta: dict[str, Any]
    fds: tuple[int, ...] = ()


class Keeper(Protocol):
    """Keeps what a later process needs to go on.

    Names: "epoch", "pool/<n>", "pool/<n>/part/<rank>", "session/<number>", "member/<session>/<k>", "device/<uuid>".
    What is told takes effect in the order of the calls, and survives this process from the return on [S15].
    """

    @property
    def kept(self) -> Mapping[str, Kept]:
        """All that is kept, by name, in the order in which the names came up.

        The descriptors are those that a process before this one has kept. They stay open until dropped, replaced or
        handed over; duplicate to own one.
        """

    def hand_over(self, name: str) -> tuple[int, ...]:
        """Returns the descriptors under a name; they are the caller's now, and kept as before."""

    def keep(self, name: str, meta: dict[str, Any], fds: Iterable[int] = ()) -> None:
        """Keeps `meta` and duplicates of `fds`. A name known already gets the new meta, and the new fds if any."""

    def drop(self, name: str) -> None:
        """Keeps it no longer; an unknown name is nothing."""


class Store:
    """Names with what is kept under each; owns the descriptors."""

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}

    def take(self, name: str, meta: dict[str, Any], fds: tuple[int, ...]) -> None:
        """Keeps `meta` and the descriptors themselves; a name known already keeps its old ones if there are no new."""
        before = self.kept.get(name)
        if before is not None and fds:
            _close(before.fds)
        self.kept[name] = Kept(meta, fds or (() if before is None else before.fds))

    def drop(self, name: str) -> None:
        """Closes what is kept under the name; an unknown one is nothing."""
        kept = self.kept.pop(name, None)
        if kept is not None:
            _close(kept.fds)

    def apply(self, message: dict[str, Any], fds: tuple[int, ...]) -> None:
        """Does what a child asks for by "keep" or "drop"; any other message is nothing to a store."""
        match message:
            case {"keep": str(name), "meta": dict(meta)}:
                self.take(name, meta, fds)
            case {"drop": str(name)}:
                self.drop(name)

    def follow(self, control: Channel) -> None:
        """Is told of the control socket over which a child is going to ask."""

    def end_streams(self) -> None:
        """Sends the end of the stream on every kept stream socket: workers learn that they have to resume.

        Their own ends stay open, and still prove that they live. The sockets of devices' keepers are of another type,
        and go on.
        """
        for kept in self.kept.values():
            for fd in kept.fds:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    # Not of a duplicate: there may be no room for one.
                    connection = socket.socket(fileno=fd)
                    if connection.type == socket.SOCK_STREAM:
                        with contextlib.suppress(OSError):
                            connection.shutdown(socket.SHUT_WR)
                    connection.detach()

    def close(self) -> None:
        """Drops everything."""
        for name in [*self.kept]:
            self.drop(name)


class Unkept(Store):
    """A keeper in memory only, which survives nothing; its `kept` has what this process keeps too."""

    def keep(self, name: str, meta: dict[str, Any], fds: Iterable[int] = ()) -> None:
        """As Keeper says."""
        self.take(name, meta, tuple(os.dup(fd) for fd in fds))

    def hand_over(self, name: str) -> tuple[int, ...]:
        """As Keeper says."""
        return tuple(os.dup(fd) for fd in self.kept[name].fds)


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
