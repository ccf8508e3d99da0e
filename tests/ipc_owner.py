"""Another process that owns cuda_ipc arenas, as a keeper of a device does.

Commands and answers travel as pickles on a Unix socket that keeps messages apart.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kvharbor.gpumem import ArenaKind, Export, GpumemError, IpcArena, IpcMapping, device_of, driver
from kvharbor.gpumem.devices import current

_MESSAGE_BYTES = 1 << 17
_DEADLINE_S = 60


class IpcOwner:
    """The test's end: each method is one command there; what the process raises of ours is raised here."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_DEADLINE_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ipc_owner", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**environment, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            )

    def create(self, size_bytes: int, device: str) -> Export:
        """Makes an arena on a device, and returns how to map it."""
        return self._ask("create", size_bytes, device)  # type: ignore[no-any-return]

    def read(self, export: Export, first: int, count: int) -> bytes:
        """Returns bytes of an arena of its own."""
        return self._ask("read", export.ipc_handle, first, count)  # type: ignore[no-any-return]

    def write(self, export: Export, first: int, content: bytes) -> None:
        """Stores bytes in an arena of its own."""
        self._ask("write", export.ipc_handle, first, content)

    def free(self, export: Export) -> None:
        """Frees an arena of its own."""
        self._ask("free", export.ipc_handle)

    def free_all(self) -> None:
        """Frees what arenas it still has."""
        self._ask("free_all")

    def map_own(self, export: Export) -> None:
        """Lets the owner try to map what it has exported."""
        self._ask("map_own", export)

    def use_async_pool(self) -> None:
        """Lets CuPy there allocate from a stream-ordered pool, whose memory cannot be exported."""
        self._ask("use_async_pool")

    def kill(self) -> None:
        """Kills the process outright and waits until it is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(_DEADLINE_S)

    def _ask(self, command: str, *arguments: object) -> Any:
        self._channel.send(pickle.dumps((command, arguments)))
        message = self._channel.recv(_MESSAGE_BYTES)
        if not message:
            raise EOFError(f"the owner went away during {command}")
        kind, answer = pickle.loads(message)
        if kind is not None:
            raise OwnerRefused(kind, answer)
        return answer

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


@dataclass(frozen=True)
class OwnedArena:
    """A cuda_ipc arena, which is the owner's."""

    owner: IpcOwner
    exported: Export

    kind = ArenaKind.CUDA_IPC

    @property
    def size_bytes(self) -> int:
        return self.exported.size_bytes

    def export(self) -> Export:
        return self.exported

    def close(self) -> None:
        self.owner.free(self.exported)


class OwnerRefused(Exception):
    """The owner's code has raised a GpumemError: its reason and its text."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


class _Owner:
    """The other end: its arenas by handle."""

    def __init__(self) -> None:
        self._arenas: dict[bytes, IpcArena] = {}

    def create(self, size_bytes: int, device: str) -> Export:
        arena = IpcArena.create(size_bytes, device_of(device))
        export = arena.export()
        self._arenas[export.ipc_handle] = arena
        return export

    def read(self, handle: bytes, first: int, count: int) -> bytes:
        arena = self._arenas[handle]
        with current(arena.device):
            return driver.read_bytes(arena.address + first, count)

    def write(self, handle: bytes, first: int, content: bytes) -> None:
        arena = self._arenas[handle]
        with current(arena.device):
            driver.write_bytes(arena.address + first, content)
            driver.context_synchronize()

    def free(self, handle: bytes) -> None:
        self._arenas.pop(handle).close()

    def free_all(self) -> None:
        while self._arenas:
            self._arenas.popitem()[1].close()

    def map_own(self, export: Export) -> None:
        IpcMapping.attach(export)

    def use_async_pool(self) -> None:
        import cupy

        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)


def _serve(channel: socket.socket) -> None:
    owner = _Owner()
    while message := channel.recv(_MESSAGE_BYTES):
        command, arguments = pickle.loads(message)
        answer: tuple[str | None, Any]
        try:
            answer = None, getattr(owner, command)(*arguments)
        except GpumemError as refusal:
            answer = refusal.reason, str(refusal)
        channel.send(pickle.dumps(answer))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        _serve(inherited)
