"""The keeper of one device's memory for the arena cuda_ipc.

It is started as `python -m kvharbor.server.memory.device_keeper FD UUID RUNTIME`.

Memory behind CUDA's IPC handles lives and dies with the process that has allocated it. So that is this one, which does
nothing else: it allocates, zeroes, exports and frees, for one service process after the other. They ask on the control
socket FD, whose other end the supervisor keeps; the keeper ends when every copy of that is closed.

Each request has an id, which its answer names: the answer to a service that has died meanwhile is nobody's.

    {"id", "do": "allocate", "size_bytes"}        {"id", "ipc_handle", "exporter_pid"} or {"id", "insufficient": {...}}
    {"id", "do": "free", "allocation"}            {"id"}
    {"id", "do": "hold_only", "allocations"}      {"id", "missing"}

An allocation is named by the id of the request that made it. Before the first answer comes {"ready"} or {"unusable"}.
"""

import os
import signal
import sys
from typing import Any

from kvharbor.gpumem import DeviceFailed, GpumemError, InsufficientMemory, device_of
from kvharbor.gpumem.cuda_ipc import IpcArena
from kvharbor.gpumem.devices import Device
from kvharbor.gpumem.ipc_runtime import IpcRuntime, runtime_of
from kvharbor.server.supervision.control import Channel


class DeviceKeeper:
    """Owns allocations on one device, by name, until they are freed or the process ends."""

    def __init__(self, device: Device, runtime: IpcRuntime) -> None:
        self._device = device
        self._runtime = runtime
        self._arenas: dict[str, IpcArena] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does what is asked; returns what to say of it. What it raises is a broken device, or a broken caller."""
        match request["do"]:
            case "allocate":
                return self._allocate(request["id"], request["size_bytes"])
            case "free":
                return self._free(request["allocation"])
            case "hold_only":
                return self._hold_only(request["allocations"])
        raise ValueError(f"a keeper does not {request['do']}")

    def _allocate(self, name: str, size_bytes: int) -> dict[str, Any]:
        try:
            arena = self._arenas[name] = IpcArena.create(size_bytes, self._device, self._runtime)
        except InsufficientMemory as refusal:
            return {"insufficient": _facts(refusal.needed_bytes, refusal.available_bytes, refusal.limited_by)}
        except DeviceFailed as failure:
            if not failure.out_of_memory:
                raise
            return {"insufficient": _facts(size_bytes, 0, f"device {self._device.uuid} ({failure.call})")}
        export = arena.export()
        return {"ipc_handle": export.ipc_handle.hex(), "exporter_pid": export.exporter_pid}

    def _free(self, name: str) -> dict[str, Any]:
        arena = self._arenas.pop(name, None)
        if arena is not None:
            arena.close()
        return {}

    def _hold_only(self, names: list[str]) -> dict[str, Any]:
        """Frees what no later service knows: its maker has died before anybody was told of it, or it was dropped."""
        for name in self._arenas.keys() - set(names):
            self._free(name)
        return {"missing": [name for name in names if name not in self._arenas]}


def _facts(needed_bytes: int, available_bytes: int, limited_by: str) -> dict[str, Any]:
    return {"needed_bytes": needed_bytes, "available_bytes": available_bytes, "limited_by": limited_by}


def main() -> None:
    """Keeps the device's memory until nobody can ask for it any more."""
    # The supervisor decides what a signal to the group means: the end of its socket says so.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel.inherited(int(sys.argv[1]))
    try:
        keeper = DeviceKeeper(device_of(sys.argv[2]), runtime_of(sys.argv[3]))
    except GpumemError as refused:
        channel.send({"unusable": str(refused)})
        return
    channel.send({"ready": os.getpid()})
    while (received := channel.receive()) is not None:
        request, _ = received
        try:
            answer = keeper.answer(request)
        except GpumemError as failure:
            # What the device holds is not known any more, and whoever asks next must not be told otherwise.
            channel.send({"broken": str(failure)})
            sys.exit(1)
        channel.send({"id": request["id"], **answer})


if __name__ == "__main__":
    main()
