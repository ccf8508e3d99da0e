"""Which arenas a life of the service's state has, ready to start."""

import os

from kvharbor.gpumem import ArenaKind
from kvharbor.gpumem.ipc_runtime import RUNTIME_VARIABLE
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.memory.arenas import Arenas, HostArenas
from kvharbor.server.memory.device_arenas import IpcArenas, VmmArenas
from kvharbor.server.memory.device_keepers import DeviceKeepers
from kvharbor.server.memory.work_thread import DeviceThread
from kvharbor.server.pools.kept import kept_allocations
from kvharbor.server.pools.life import Life
from kvharbor.server.supervision.crash import crash, end_cold
from kvharbor.server.supervision.keeper import Keeper


def arenas_of(settings: Settings, life: Life, keeper: Keeper) -> Arenas:
    """Returns the arenas of the kind that the life has begun with, whatever is set now."""
    kind = ArenaKind(life.arena)
    if kind is ArenaKind.HOST:
        return HostArenas()
    # For what opens a handle in this process, and in those that it starts.
    os.environ[RUNTIME_VARIABLE] = settings.cuda_runtime
    threads = {uuid: DeviceThread(uuid, crash) for uuid in life.devices}
    if kind is ArenaKind.CUDA_VMM:
        return VmmArenas(threads, grace_s=settings.device_grace_s)

    def lost(device: str, cause: str) -> None:
        end_cold(keeper, f"the keeper of device {device} has failed: {cause}")

    keepers = DeviceKeepers([*threads], keeper, settings.cuda_runtime, lost)
    return IpcArenas(threads, keepers, kept_allocations(keeper), grace_s=settings.device_grace_s)
