"""Messages between the harness and its processes: whole or not at all, and never waiting.

A process may be killed in the middle of anything, or stopped and not reading: a message that has no room is dropped.
"""

import json
import socket
from typing import Any

_MOST_BYTES = 128 * 1024

Message = dict[str, Any]


class Channel:
    """One end of a pair of sockets that keep messages apart."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple["Channel", socket.socket]:
        """Returns our end, and the other one to hand to a process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def fileno(self) -> int:
        """For selectors."""
        return self._end.fileno()

    def send(self, kind: str, **fields: Any) -> bool:
        """Sends a message; returns whether there was room and somebody to have it."""
        try:
            self._end.send(json.dumps({"kind": kind, **fields}).encode(), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float | None) -> Message | None:
        """Returns the next message, None if none has come in time; raises EOFError once the other end is gone."""
        self._end.settimeout(timeout_s)
        try:
            data = self._end.recv(_MOST_BYTES)
        except (TimeoutError, BlockingIOError):
            return None
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        message: Message = json.loads(data)
        return message

    def close(self) -> None:
        """Closes this end."""
        self._end.close()
