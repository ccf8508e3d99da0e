"""systemd's file descriptor store: a second place for what is kept, so that it outlives the supervisor too.

Each name has one memory file with its facts ("NAME#meta") and its descriptors ("NAME#0" and so on). "control" is the
control socket of the child: what it had said and nobody had heard yet is heard by the next supervisor.

systemd drops what exceeds FileDescriptorStoreMax= without a word. A part of what is kept must never be taken for the
whole: a session that is missing would lose its blocks to others while it uses them [G3]. So descriptors are counted,
and a store that cannot have them all is given up whole.
"""

import json
import os
import re
import socket
import zlib
from collections.abc import Mapping
from typing import Any

import structlog

from kvharbor.server.supervision.control import Channel
from kvharbor.server.supervision.keeper import Store
from kvharbor.server.supervision.notify import Notifier

log = structlog.get_logger(__name__)

_FIRST_FD = 3
_CONTROL = "control"
_COLD = "if the supervisor is killed, the next start is cold"
_HEAD_BYTES = 12
_VOID = bytes(8) + b"\xff" * 4
"""A head that no record has: the sum of nothing is 0."""


class SystemdStore(Store):
    """A store of which systemd has a copy. Made empty; `take_up` fills it with what a supervisor before has left.

    systemd keeps at most `limit` descriptors. Once they do not suffice, or it does not listen, it has none of them,
    for as long as this supervisor lives, which goes on without.
    """

    def __init__(self, notifier: Notifier, limit: int) -> None:
        super().__init__()
        self._notifier = notifier
        self._limit = limit
        self._metas: dict[str, int] = {}
        # What systemd has, by name; the control socket's place is never another's.
        self._names = {_CONTROL}
        self._given_up = False

    def take(self, name: str, meta: dict[str, Any], fds: tuple[int, ...]) -> None:
        """As Store does. The facts come last: without them the descriptors mean nothing."""
        before = self.kept.get(name)
        if before is not None and fds:
            for index in range(len(before.fds)):
                self._remove(f"{name}#{index}")
        for index, fd in enumerate(fds):
            self._add(f"{name}#{index}", fd)
        super().take(name, meta, fds)
        if name in self._metas:
            _write(self._metas[name], meta, len(self.kept[name].fds))
        elif not self._given_up:
            self._metas[name] = os.memfd_create("kvharbor-meta")
            _write(self._metas[name], meta, len(fds))
            self._add(f"{name}#meta", self._metas[name])

    def drop(self, name: str) -> None:
        """As Store does. The facts go first."""
        if name in self._metas:
            self._remove(f"{name}#meta")
            for index in range(len(self.kept[name].fds)):
                self._remove(f"{name}#{index}")
        if name in self._metas:  # not given up by now
            os.close(self._metas.pop(name))
        super().drop(name)

    def follow(self, control: Channel) -> None:
        """Has systemd keep the control socket of the child that begins, instead of that of the one before."""
        self._remove(_CONTROL)
        self._add(_CONTROL, control.fileno())

    def take_up(self, found: dict[str, int]) -> None:
        """Takes over descriptors by their names in systemd's store; what is not whole is dropped there."""
        control = found.pop(_CONTROL, None)
        for key in [key for key in found if key.endswith("#meta")]:
            name = key.removesuffix("#meta")
            record = _read(found[key])
            fds = [found.get(f"{name}#{index}") for index in range(record[1])] if record is not None else [None]
            if record is not None and None not in fds:
                self._metas[name] = found.pop(key)
                own = tuple(found.pop(f"{name}#{index}") for index in range(record[1]))
                self._names.update((key, *(f"{name}#{index}" for index in range(record[1]))))
                super().take(name, record[0], own)
        for key, fd in found.items():
            log.warning("what systemd has kept is not whole and is dropped", name=key)
            self._remove(key)
            os.close(fd)
        if control is not None:
            self._hear_out(Channel(socket.socket(fileno=control)))

    def _hear_out(self, control: Channel) -> None:
        """Hears what the last child had said, if the rest of what it means is there."""
        while self.kept and (received := control.receive(flags=socket.MSG_DONTWAIT)) is not None:
            self.apply(*received)
        control.close()

    def _add(self, name: str, fd: int) -> None:
        if self._given_up:
            return
        if name not in self._names and len(self._names) >= self._limit:
            self._give_up(
                f"systemd's descriptor store is full and given up: {_COLD}",
                limit=self._limit,
                remedy="raise FileDescriptorStoreMax= of the unit and restart it",
            )
            return
        self._names.add(name)
        # Without polling: the end of a stream is no reason to forget whose it was.
        self._tell(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (fd,))

    def _remove(self, name: str) -> None:
        if not self._given_up:
            if name != _CONTROL:
                self._names.discard(name)
            self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def _tell(self, state: str, fds: tuple[int, ...] = ()) -> None:
        if not self._notifier.send(state, fds) and not self._given_up:
            self._give_up(
                f"systemd does not listen, its descriptor store is given up: {_COLD}",
                remedy="restart the unit when systemd listens again",
            )

    def _give_up(self, event: str, **facts: object) -> None:
        """Has systemd keep nothing any more, even if it does not hear of it: the facts there are made void first."""
        log.error(event, **facts)
        self._given_up = True
        for fd in self._metas.values():
            os.pwrite(fd, _VOID, 0)
            os.close(fd)
        self._metas.clear()
        for name in self._names:
            if not self._notifier.send(f"FDSTOREREMOVE=1\nFDNAME={name}"):
                break


def store_limit(environment: Mapping[str, str]) -> int:
    """Returns how many descriptors systemd keeps for this process; 0: none.

    It says so since version 254, where FileDescriptorStoreMax= is set.
    """
    return int(environment.get("FDSTORE", "0")) if "NOTIFY_SOCKET" in environment else 0


def stored_descriptors(environment: Mapping[str, str]) -> dict[str, int]:
    """Returns the descriptors that systemd has passed to this process, by name; they are the caller's."""
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    found = {}
    for fd, name in enumerate(names[: int(environment["LISTEN_FDS"])], _FIRST_FD):
        os.set_inheritable(fd, False)
        if re.fullmatch(r"control|.+#(meta|\d+)", name):
            found[name] = fd
    return found


def _write(fd: int, meta: dict[str, Any], fd_count: int) -> None:
    """Writes facts whole or torn: the sum before them tells which."""
    data = json.dumps([meta, fd_count]).encode()
    os.pwrite(fd, len(data).to_bytes(8, "little") + zlib.crc32(data).to_bytes(4, "little") + data, 0)


def _read(fd: int) -> tuple[dict[str, Any], int] | None:
    head = os.pread(fd, _HEAD_BYTES, 0)
    data = os.pread(fd, int.from_bytes(head[:8], "little"), _HEAD_BYTES)
    if len(head) < _HEAD_BYTES or zlib.crc32(data) != int.from_bytes(head[8:], "little"):
        return None
    meta, fd_count = json.loads(data)
    return meta, fd_count
