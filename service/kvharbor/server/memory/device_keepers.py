"""The service's side of the keepers: one process a device, which holds the memory of the arena cuda_ipc for it."""

import asyncio
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from kvharbor.gpumem import ArenaKind, Export, InsufficientMemory, ReservationCancelled
from kvharbor.server.errors import StartupError
from kvharbor.server.supervision.control import Channel
from kvharbor.server.supervision.keeper import Keeper

log = structlog.get_logger(__name__)

START_LIMIT_S = 60.0
"""Until a keeper has to be ready, which imports CuPy, and until it has to answer a service that begins."""
_LOOK_S = 0.1
_PREFIX = "device/"

Lost = Callable[[str, str], None]
"""Is told the device whose keeper is gone, and the cause. Does not return."""


class KeeperLink:
    """The socket to the keeper of one device. Answers come in any order, and those to nobody are passed over."""

    def __init__(self, uuid: str, channel: Channel, lost: Lost) -> None:
        self._uuid = uuid
        self._channel = channel
        self._lost = lost
        self._asked: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._is_unusable = False
        self._began: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(channel.fileno(), self._hear)

    async def began(self) -> None:
        """Waits until a new keeper can be asked. Raises StartupError if it cannot be used, or says nothing."""
        try:
            async with asyncio.timeout(START_LIMIT_S):
                first = await self._began
        except TimeoutError:
            raise StartupError(
                f"the keeper of device {self._uuid} is not ready after {START_LIMIT_S:g} s: see `kvharbor doctor`"
            ) from None
        if "unusable" in first:
            raise StartupError(f"the keeper of device {self._uuid} cannot start: {first['unusable']}")
        log.info("keeper began", device=self._uuid, pid=first["ready"])

    def ask(self, do: str, **values: Any) -> tuple[str, "asyncio.Future[dict[str, Any]]"]:
        """Sends a request; returns its id and what gets the answer."""
        name = secrets.token_hex(8)
        answered = self._asked[name] = asyncio.get_running_loop().create_future()
        answered.add_done_callback(lambda _: self._asked.pop(name))
        try:
            self._channel.send({"id": name, "do": do, **values}, flags=socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError):
            self._lost(self._uuid, "its process has ended")
        return name, answered

    def close(self) -> None:
        """Listens no longer; the keeper goes on as long as the supervisor has its socket."""
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        for waiting in [*self._asked.values()]:
            waiting.cancel()

    def _hear(self) -> None:
        try:
            while (received := self._channel.receive(flags=socket.MSG_DONTWAIT)) is not None:
                self._heard(received[0])
        except BlockingIOError:
            return
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        if not self._is_unusable:
            self._lost(self._uuid, "its process has ended")

    def _heard(self, message: dict[str, Any]) -> None:
        match message:
            case {"id": str(name)}:
                waiting = self._asked.get(name)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
                elif "ipc_handle" in message:
                    # Whoever wanted it has given up.
                    self.ask("free", allocation=name)
            case {"broken": str(cause)}:
                self._lost(self._uuid, cause)
            case _:
                self._is_unusable = "unusable" in message
                if not self._began.done():
                    self._began.set_result(message)


class DeviceKeepers:
    """The keepers of several devices. Each is kept with the supervisor, and serves one service process after the other.

    A keeper that is gone has taken the memory of its device with it: `lost` is told, and ends this process [S28].
    """

    def __init__(self, uuids: Sequence[str], keeper: Keeper, runtime: str, lost: Lost) -> None:
        self._uuids = uuids
        self._keeper = keeper
        self._runtime = runtime
        self._lost = lost
        self._links: dict[str, KeeperLink] = {}

    async def start(self, allocations: Sequence[str]) -> None:
        """Takes up the keepers that there are, and begins those that are missing.

        Of what a keeper has, it goes on to hold the `allocations` only: others were never told to anybody, or are
        those of dropped pools. Raises StartupError.
        """
        fresh = []
        for uuid in self._uuids:
            kept = f"{_PREFIX}{uuid}" in self._keeper.kept
            self._links[uuid] = self._taken_up(uuid) if kept else self._begun(uuid)
            if not kept:
                fresh.append(self._links[uuid])
        await asyncio.gather(*(link.began() for link in fresh))
        asked = [link.ask("hold_only", allocations=allocations)[1] for link in self._links.values()]
        try:
            async with asyncio.timeout(START_LIMIT_S):
                answers = await asyncio.gather(*asked)
        except TimeoutError:
            self._lost(", ".join(self._uuids), f"one of them has not answered for {START_LIMIT_S:g} s")
            raise
        missing = set(allocations).intersection(*(answer["missing"] for answer in answers))
        if missing:
            self._lost(", ".join(self._uuids), f"{len(missing)} allocations of pools are not with their keeper")

    async def allocate(self, uuid: str, size_bytes: int, cancelled: Callable[[], bool]) -> tuple[str, Export]:
        """Returns the name of zeroed memory, and what others need to map it. It is the keeper's until `free`.

        Raises InsufficientMemory; ReservationCancelled once `cancelled()` is true, and then nothing stays taken. A
        device that hangs makes this wait and nobody else: what is allocated needs no keeper to be mapped.
        """
        name, answered = self._links[uuid].ask("allocate", size_bytes=size_bytes)
        try:
            while not (await asyncio.wait([answered], timeout=_LOOK_S))[0]:
                if cancelled():
                    raise ReservationCancelled(0, size_bytes=size_bytes)
        except BaseException:
            answered.cancel()
            raise
        answer = answered.result()
        if "insufficient" in answer:
            raise InsufficientMemory(**answer["insufficient"])
        handle = bytes.fromhex(answer["ipc_handle"])
        pid = answer["exporter_pid"]
        return name, Export(ArenaKind.CUDA_IPC, size_bytes, device=uuid, ipc_handle=handle, exporter_pid=pid)

    async def free(self, uuid: str, allocation: str) -> None:
        """Gives an allocation back. The caller knows that no process has it open any more."""
        await self._links[uuid].ask("free", allocation=allocation)[1]

    def close(self) -> None:
        """Listens to the keepers no longer."""
        for link in self._links.values():
            link.close()

    def _taken_up(self, uuid: str) -> KeeperLink:
        (fd,) = self._keeper.hand_over(f"{_PREFIX}{uuid}")
        return KeeperLink(uuid, Channel(socket.socket(fileno=fd)), self._lost)

    def _begun(self, uuid: str) -> KeeperLink:
        ours, theirs = Channel.pair()
        # Not from the working directory: what lies there is not ours to run.
        module = [sys.executable, "-P", "-m", "kvharbor.server.memory.device_keeper"]
        command = [*module, str(theirs.fileno()), uuid, self._runtime]
        nothing = subprocess.DEVNULL
        try:
            process = subprocess.Popen(command, stdin=nothing, stdout=nothing, pass_fds=[theirs.fileno()])
        finally:
            theirs.close()
        # It outlives this process: whoever is its parent then waits for it, and Popen must not.
        process.returncode = 0
        # Before it has anything: a later process is to find it with all that it holds [S15].
        self._keeper.keep(f"{_PREFIX}{uuid}", {"pid": process.pid}, (ours.fileno(),))
        return KeeperLink(uuid, ours, self._lost)
