"""One child process as the supervisor has it: started, spoken to, heard, and ended."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from kvharbor.server.supervision.control import Channel
from kvharbor.server.supervision.keeper import Store

log = structlog.get_logger(__name__)

_RETRY_S = 0.1

Hear = Callable[["Offspring", dict[str, Any], tuple[int, ...]], None]
"""Gets each message of a child; its descriptors are the callee's."""


class Offspring:
    """A child: first it imports what it needs (`standing_by`), then it may `start`, then it is ready.

    `ended` gets its exit status, negative for a signal, after its last message was heard.
    """

    def __init__(self, arguments: Sequence[str], inherited_fds: Sequence[int], hear: Hear) -> None:
        self._channel, theirs = Channel.pair()
        fds = (theirs.fileno(), *inherited_fds)
        # Its descriptors come first: which they are, and whose death is to be its own.
        numbers = [str(number) for number in (os.getpid(), *fds)]
        # Not from the working directory: what lies there is not ours to run.
        command = [sys.executable, "-P", "-m", "kvharbor.server.child", *numbers, *arguments]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()
        self._hear = hear
        self._unsent: deque[tuple[dict[str, Any], tuple[int, ...]]] = deque()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._listen()
        self.standing_by = asyncio.Event()
        self.ready = asyncio.Event()
        self._ready_at = 0.0
        # Why it cannot start, if it has said so.
        self.refusal = ""
        self.silent_s = 0.0
        # Once it has ended: whether all that it had said could be taken in.
        self.was_heard = True

    @property
    def pid(self) -> int:
        """Its process id, valid until it has ended."""
        return self._process.pid

    @property
    def served_s(self) -> float | None:
        """Seconds since it was ready; None if it never was."""
        return time.monotonic() - self._ready_at if self.ready.is_set() else None

    def begin_service(self) -> None:
        """Takes note that it is ready."""
        self._ready_at = time.monotonic()
        self.ready.set()

    async def reaches(self, point: asyncio.Event, timeout_s: float | None = None) -> bool:
        """Waits for an event of its life; False if it ends first, or takes longer."""
        waiting = asyncio.ensure_future(point.wait())
        try:
            await asyncio.wait((waiting, self.ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return point.is_set() and not self.ended.done()

    def start(self, store: Store, *, after: str) -> None:
        """Hands over all that is kept, and lets it serve. `after` tells what ended the one before, if there was one."""
        self.silent_s = 0.0
        store.follow(self._channel)
        for name, kept in store.kept.items():
            self._send({"kept": name, "meta": kept.meta}, kept.fds)
        self._send({"start": after})

    def leave(self) -> None:
        """Tells it to end in order."""
        self._send({"leave": True})

    def go_on(self, cause: str) -> None:
        """Tells it that its upgrade was given up, and why."""
        if not self.ended.done():
            self._send({"upgrade_given_up": cause})

    def kill(self) -> None:
        """Ends it at once."""
        if not self.ended.done():
            os.kill(self.pid, signal.SIGKILL)

    def hear(self) -> bool:
        """Takes in what it has said; False when some of that cannot be taken in now."""
        loop = asyncio.get_running_loop()
        try:
            # Taken off the socket only after it has had its effect: a later supervisor may have to hear it.
            while (received := self._channel.receive(flags=socket.MSG_DONTWAIT | socket.MSG_PEEK)) is not None:
                try:
                    self._hear(self, *received)
                finally:
                    self._channel.skip()
        except BlockingIOError:
            return True
        except OSError as failure:
            log.error("cannot take in what the service's process wants kept", pid=self.pid, error=str(failure))
            loop.call_later(_RETRY_S, self._listen)
            loop.remove_reader(self._channel.fileno())
            return False
        loop.remove_reader(self._channel.fileno())
        return True

    def _listen(self) -> None:
        if not self.ended.done():
            asyncio.get_running_loop().add_reader(self._channel.fileno(), self.hear)

    def reaped(self, status: int) -> None:
        """Takes note of its end."""
        self._process.returncode = status
        self.was_heard = self.hear()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._channel.fileno())
        loop.remove_writer(self._channel.fileno())
        self._channel.close()
        self._unsent.clear()
        self.ended.set_result(status)

    def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        self._unsent.append((message, fds))
        if len(self._unsent) == 1:
            self._flush()

    def _retry(self) -> None:
        if not self.ended.done():
            self._flush()

    def _flush(self) -> None:
        """Sends as much as there is room for: a child that does not read must not hold up its supervisor."""
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                self._channel.send(*self._unsent[0], flags=socket.MSG_DONTWAIT)
                self._unsent.popleft()
        except BlockingIOError:
            loop.add_writer(self._channel.fileno(), self._flush)
            return
        except (BrokenPipeError, ConnectionResetError):
            # It has died; who waits for it will hear.
            self._unsent.clear()
        except OSError as failure:
            # Descriptors under way are bounded too.
            log.error("cannot hand over what is kept", pid=self.pid, error=failure.strerror)
            loop.call_later(_RETRY_S, self._retry)
        loop.remove_writer(self._channel.fileno())
