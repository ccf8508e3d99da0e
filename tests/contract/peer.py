"""A second process for the contract tests: the test's end of it. What it runs is in peer_process.

Commands travel as pickles on a Unix socket that keeps messages apart, descriptors beside them (SCM_RIGHTS).
"""

import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar, Self

from kvharbor.gpumem import Export

MESSAGE_BYTES = 1 << 20
MOST_DESCRIPTORS = 32
_DEADLINE_S = 30


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """An error of gpumem's in the other process."""

    reason: str
    metadata: dict[str, str]


class Peer:
    """The test's end: one method call is one command and its answer."""

    program: ClassVar[str] = "contract.peer_process"

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.process = process
        self._channel = channel

    @classmethod
    def spawned(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Starts the other process, a fresh interpreter that inherits nothing but its end of the socket."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.settimeout(_DEADLINE_S)
        with other:
            process = subprocess.Popen(
                [sys.executable, "-m", cls.program, str(other.fileno())],
                pass_fds=[other.fileno()],
                env={**environment, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            )
        return cls(process, own)

    def ask(self, command: str, *arguments: object) -> Any:
        """Runs one command there and returns its answer, a Refusal if that is what it was.

        Raises EOFError if the process ends over it.
        """
        self._send(command, arguments, ())
        return self._answer(command)[0]

    def create(self, kind: str, size_bytes: int, device: str = "") -> Export:
        """Makes an arena there, and lets go of an earlier one; the descriptors in the export are the caller's."""
        self._send("create", (kind, size_bytes, device), ())
        export: Export
        export, fds = self._answer("create")
        return dataclasses.replace(export, fds=tuple(fds))

    def attach(self, kind: str, export: Export, *, writable: bool = True) -> Refusal | None:
        """Maps an arena there."""
        self._send("attach", (kind, dataclasses.replace(export, fds=()), writable), export.fds)
        refusal: Refusal | None = self._answer("attach")[0]
        return refusal

    def kill(self) -> None:
        """Kills the process outright and waits until it is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(_DEADLINE_S)

    def _send(self, command: str, arguments: tuple[object, ...], fds: tuple[int, ...]) -> None:
        socket.send_fds(self._channel, [pickle.dumps((command, arguments))], fds)

    def _answer(self, command: str) -> tuple[Any, list[int]]:
        message, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not message:
            raise EOFError(f"the peer went away during {command}")
        return pickle.loads(message), fds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._channel.close()
        try:
            self.process.wait(_DEADLINE_S)
        finally:
            self.process.kill()
            self.process.wait()
