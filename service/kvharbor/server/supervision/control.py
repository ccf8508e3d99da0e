"""The socket between the supervisor and a child: messages with file descriptors, each whole or not at all."""

import array
import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

MAX_MESSAGE_BYTES = 128 * 1024
MAX_FDS = 64
_BUFFER_BYTES = 4 * 2**20

T = TypeVar("T")


class Channel:
    """One end. A message is a JSON object of at most MAX_MESSAGE_BYTES with at most MAX_FDS descriptors.

    Messages arrive in order and outlive their sender: what a process has sent before it died can still be received.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Returns two connected ends, closed on exec."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in ends:
            # As much as the system allows: the child sends from its event loop, and must not wait for a slow reader.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        return cls(ends[0]), cls(ends[1])

    @classmethod
    def inherited(cls, fd: int) -> Self:
        """Takes over an end that this process was started with."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Returns the descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = (), *, flags: int = 0) -> None:
        """Sends a message and duplicates of `fds`; waits for room unless `flags` has MSG_DONTWAIT.

        Raises BlockingIOError where it may not wait, and another OSError when the other end is gone.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MAX_MESSAGE_BYTES or len(fds) > MAX_FDS:
            raise ValueError(f"a message of {len(data)} bytes and {len(fds)} descriptors is too large to be kept")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._connection.sendmsg([data], rights, flags | socket.MSG_NOSIGNAL)

    def receive(self, *, flags: int = 0) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        """Returns the next message with its descriptors, which are the caller's; None when the other end is gone.

        Raises BlockingIOError where there is none and `flags` has MSG_DONTWAIT, OSError when descriptors were lost.
        """
        room = socket.CMSG_LEN(MAX_FDS * array.array("i").itemsize)
        data, ancillary, found, _ = _past_reset(
            lambda: self._connection.recvmsg(MAX_MESSAGE_BYTES, room, flags | socket.MSG_CMSG_CLOEXEC)
        )
        fds = array.array("i")
        for _, _, rights in ancillary:
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
        if found & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            for fd in fds:
                os.close(fd)
            raise OSError("a message of the control socket was cut off: raise the limit on open files")
        return (json.loads(data), tuple(fds)) if data else None

    def skip(self) -> None:
        """Takes off the next message, which was looked at with MSG_PEEK."""
        _past_reset(lambda: self._connection.recv(1))

    def close(self) -> None:
        """Closes this end."""
        self._connection.close()


def _past_reset(receive: Callable[[], T]) -> T:
    """Receives from an end whose other one may have died with messages of ours unread.

    That is told once, and before what it had sent itself.
    """
    try:
        return receive()
    except ConnectionResetError:
        return receive()
