"""A second process for the contract tests: the test's end of it, and what it runs.

Commands travel as pickles on a Unix socket that keeps messages apart, descriptors beside them (SCM_RIGHTS).
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from contract.arena_kinds import KINDS
from kvharbor.gpumem import BlockViews, Descriptor, GpumemError, HostArena, Mapping, copy_blocks

_MESSAGE_BYTES = 1 << 16
_DEADLINE_S = 30


class Peer:
    """The test's end: one method call is one command and its answer."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.process = process
        self._channel = channel

    @classmethod
    def spawned(cls) -> Self:
        """Starts the other process, a fresh interpreter that inherits nothing but its end of the socket."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.settimeout(_DEADLINE_S)
        with other:
            process = subprocess.Popen(
                [sys.executable, "-m", "contract.peer", str(other.fileno())],
                pass_fds=[other.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            )
        return cls(process, own)

    def call(self, command: str, *arguments: object, fds: list[int] | None = None) -> tuple[Any, list[int]]:
        """Runs one command there; returns its answer and the descriptors that came with it (the caller's)."""
        socket.send_fds(self._channel, [pickle.dumps((command, arguments))], fds or [])
        message, received, _, _ = socket.recv_fds(self._channel, _MESSAGE_BYTES, 8)
        if not message:
            raise EOFError(f"the peer went away during {command}")
        return pickle.loads(message), received

    def ask(self, command: str, *arguments: object, fds: list[int] | None = None) -> Any:
        """Runs one command there that sends no descriptors back."""
        answer, received = self.call(command, *arguments, fds=fds)
        if received:
            raise RuntimeError(f"{command} sent {len(received)} descriptors")
        return answer

    def kill(self) -> None:
        """Kills the process outright and waits until it is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(_DEADLINE_S)

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


class _Session:
    """The other end: an arena it may own, a mapping it may have."""

    def __init__(self) -> None:
        self.arena: HostArena | None = None
        self.mapping: Mapping | None = None
        self.views: BlockViews | None = None

    def create(self, _fds: list[int], kind: str, descriptor: Descriptor) -> tuple[None, list[int]]:
        self.arena = KINDS[kind].create(descriptor.size_bytes)
        return None, KINDS[kind].export(self.arena)

    def attach(self, fds: list[int], kind: str, descriptor: Descriptor, writable: bool) -> None:
        self.mapping = KINDS[kind].attach(fds, descriptor.size_bytes, writable)
        self.views = BlockViews(self.mapping, descriptor)

    def write(self, _fds: list[int], plane: str, layer: int, block: int, content: bytes) -> None:
        self.views.page(plane, layer, block).data[:] = content  # type: ignore[union-attr]

    def read(self, _fds: list[int], plane: str, layer: int, block: int) -> bytes:
        return self.views.page(plane, layer, block).tobytes()  # type: ignore[union-attr]

    def copy(self, _fds: list[int], descriptor: Descriptor, pairs: list[tuple[int, int]]) -> None:
        copy_blocks(self.mapping, descriptor, pairs)  # type: ignore[arg-type]

    def store_raw(self, _fds: list[int]) -> None:
        """Stores past the read-only flag of a read-only mapping, which must end this process."""
        self.mapping.region[0] = 1  # type: ignore[union-attr]

    def detach(self, _fds: list[int]) -> None:
        self.views.close()  # type: ignore[union-attr]
        self.mapping.close()  # type: ignore[union-attr]

    def arena_lines(self, _fds: list[int]) -> tuple[int, int]:
        """How often an arena stands in the memory map of this process, and of a child forked from it."""
        child = os.fork()
        if child == 0:
            os._exit(_arena_line_count())
        _, status = os.waitpid(child, 0)
        return _arena_line_count(), os.waitstatus_to_exitcode(status)


def _arena_line_count() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:kvharbor")


def _serve(channel: socket.socket) -> None:
    session = _Session()
    while True:
        message, fds, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 8)
        if not message:
            return
        command, arguments = pickle.loads(message)
        try:
            answer = getattr(session, command)(fds, *arguments)
        except GpumemError as refusal:
            answer = refusal.reason
        for fd in fds:
            os.close(fd)
        content, sent = answer if isinstance(answer, tuple) and command == "create" else (answer, [])
        socket.send_fds(channel, [pickle.dumps(content)], sent)


if __name__ == "__main__":
    with closing(socket.socket(fileno=int(sys.argv[1]))) as inherited:
        _serve(inherited)
