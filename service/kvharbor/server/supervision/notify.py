"""What systemd is told, where it asks for it: readiness, ends, and that the service's event loop runs (sd_notify)."""

import array
import contextlib
import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Sends states to NOTIFY_SOCKET; without one it says nothing.

    Sending waits for a second at most, and what cannot be sent is lost, which `send` tells: a manager that does not
    listen must not stop the service.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        # An abstract address is written with "@".
        self._address = "\0" + path[1:] if path.startswith("@") else path
        watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._is_watched = watched and "WATCHDOG_USEC" in environment

    def ready(self, pid: int) -> None:
        """The service is usable."""
        self.send(f"READY=1\nSTATUS=Serving, process {pid}.")

    def reloading(self) -> None:
        """The service's process is being replaced; `ready` follows."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.send(f"RELOADING=1\nMONOTONIC_USEC={now_us}\nSTATUS=Replacing the service's process.")

    def stopping(self) -> None:
        """The service ends."""
        self.send("STOPPING=1\nSTATUS=Stopping.")

    def alive(self) -> None:
        """The event loop of the service's process has turned."""
        if self._is_watched:
            self.send("WATCHDOG=1")

    def send(self, state: str, fds: tuple[int, ...] = ()) -> bool:
        """Sends assignments, a line each, with duplicates of `fds`; False if they could not be sent."""
        if not self._address:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(1.0)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            with contextlib.suppress(OSError):
                sender.sendmsg([state.encode()], rights, socket.MSG_NOSIGNAL, self._address)
                return True
        return False
