"""systemd's file descriptor store: a second place for what is kept, so that it outlives the supervisor too.

Each name has one memory file with its facts ("NAME#meta") and its descriptors ("NAME#0" and so on). "control" is the
control socket of the child: what it had said and nobody had heard yet is heard by the next supervisor.
"""

import json
import os
import re
import socket
import zlib
from collections.abc import Mapping
from typing import Any

import structlog

from kvharbor.server.control import Channel
from kvharbor.server.keeper import Store
from kvharbor.server.notify import Notifier

log = structlog.get_logger(__name__)

_FIRST_FD = 3
_CONTROL = "control"
_HEAD_BYTES = 12


class SystemdStore(Store):
    """A store of which systemd has a copy. Made empty; `take_up` fills it with what a supervisor before has left."""

    def __init__(self, notifier: Notifier) -> None:
        super().__init__()
        self._notifier = notifier
        self._metas: dict[str, int] = {}

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
        else:
            self._metas[name] = os.memfd_create("kvharbor-meta")
            _write(self._metas[name], meta, len(fds))
            self._add(f"{name}#meta", self._metas[name])

    def drop(self, name: str) -> None:
        """As Store does. The facts go first."""
        if name in self._metas:
            self._remove(f"{name}#meta")
            os.close(self._metas.pop(name))
            for index in range(len(self.kept[name].fds)):
                self._remove(f"{name}#{index}")
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
                super().take(name, record[0], own)
        for key, fd in found.items():
            log.warning("what systemd has kept is not whole and is dropped", name=key)
            self._remove(key)
            os.close(fd)
        if control is not None:
            self._hear_out(Channel(socket.socket(fileno=control)))

    def _hear_out(self, control: Channel) -> None:
        while (received := control.receive(flags=socket.MSG_DONTWAIT)) is not None:
            self.apply(*received)
        control.close()

    def _add(self, name: str, fd: int) -> None:
        # Without polling: the end of a stream is no reason to forget whose it was.
        self._notifier.send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (fd,))

    def _remove(self, name: str) -> None:
        self._notifier.send(f"FDSTOREREMOVE=1\nFDNAME={name}")


def has_store(environment: Mapping[str, str]) -> bool:
    """Tells whether systemd keeps descriptors for this process: FileDescriptorStoreMax= is set (systemd 254)."""
    return environment.get("FDSTORE", "0") != "0" and "NOTIFY_SOCKET" in environment


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
    if zlib.crc32(data) != int.from_bytes(head[8:], "little"):
        return None
    meta, fd_count = json.loads(data)
    return meta, fd_count
