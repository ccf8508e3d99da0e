"""Processes of the harness: forked from a server that has imported everything, so that a start takes milliseconds."""

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.channel import Channel, Message
from chaos.reactor import Reactor

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["chaos.worker", "chaos.canary", "chaos.observer"])
_JOIN_S = 10.0


class Helper:
    """One process, with a channel to it. `heard` gets its messages, `died` is called once, at its death."""

    def __init__(
        self,
        reactor: Reactor,
        target: Callable[..., None],
        arguments: tuple[Any, ...],
        *,
        heard: Callable[[Message], None],
        died: Callable[[], None],
    ) -> None:
        self._reactor = reactor
        self._heard = heard
        self._died = died
        self.channel, theirs = Channel.pair()
        self._process = _FORKS.Process(target=_run, args=(target, theirs, arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        # Names this process for as long as it is open, unlike the pid.
        self._pidfd = os.pidfd_open(self.pid)
        self.died_at: float | None = None
        reactor.watch(self.channel, self._hear)
        reactor.watch(self._pidfd, self._end)

    def signal(self, number: int) -> None:
        """Sends a signal; does nothing to a dead process."""
        if self.died_at is None:
            with contextlib.suppress(ProcessLookupError):  # dead, and not yet noticed here
                signal.pidfd_send_signal(self._pidfd, number)

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal, and is there."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        """Kills the process and waits for its end; nobody is told."""
        if self.died_at is None:
            self.signal(signal.SIGKILL)
            self._process.join(_JOIN_S)
            self._close()

    def _hear(self) -> None:
        try:
            while (message := self.channel.receive(0.0)) is not None:
                self._heard(message)
        except EOFError:
            self._reactor.forget(self.channel)

    def _end(self) -> None:
        self.died_at = time.monotonic()
        self._process.join(_JOIN_S)
        self._close()
        self._died()

    def _close(self) -> None:
        self.died_at = self.died_at or time.monotonic()
        self._reactor.forget(self._pidfd)
        os.close(self._pidfd)
        self._drain()
        self.channel.close()

    def _drain(self) -> None:
        """Hears what was said before the end."""
        try:
            self._reactor.forget(self.channel)
        except KeyError:
            return
        try:
            while (message := self.channel.receive(0.0)) is not None:
                self._heard(message)
        except EOFError:
            pass


def _run(target: Callable[..., None], end: socket.socket, arguments: tuple[Any, ...]) -> None:
    target(end, *arguments)
