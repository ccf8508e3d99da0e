"""Looks at the devices when a life of the service's state begins: which pools may lie on, and how much each gives."""

from kvharbor.gpumem import (
    ArenaKind,
    CudaUnavailable,
    Device,
    DeviceFailed,
    DeviceNotVisible,
    device_of,
    mps_client,
    visible_devices,
)
from kvharbor.gpumem.cuda_ipc import ALLOCATION_BYTES
from kvharbor.gpumem.cuda_vmm import granularity_bytes
from kvharbor.gpumem.devices import memory_of, release_context
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.errors import StartupError
from kvharbor.server.pools.life import DeviceShare
from kvharbor.server.sizes import Share, exact_size

_REMEDY = "see `kvharbor doctor`, name other devices, or set the arena host"


def surveyed(settings: Settings) -> dict[str, DeviceShare]:
    """Returns what each device gives to pools, by UUID; blocks, as it makes a context on each for a moment.

    Raises StartupError where there is no CUDA, no such device, less memory on one than is set, or where this process
    is itself a client of MPS.
    """
    try:
        chosen = tuple(device_of(uuid) for uuid in settings.devices) or visible_devices()
        return {device.uuid: _share(device, settings) for device in chosen}
    except (CudaUnavailable, DeviceNotVisible) as refused:
        raise StartupError(f"setting arena ({settings.arena_kind}): {refused}") from None
    except DeviceFailed as failure:
        raise StartupError(f"setting arena ({settings.arena_kind}): {failure}: {_REMEDY}") from None


def _share(device: Device, settings: Settings) -> DeviceShare:
    try:
        is_mps_client = mps_client(device)
        piece_bytes = _piece_bytes(device, ArenaKind(settings.arena_kind))
        total_bytes = memory_of(device).total_bytes
        release_context(device)
    except DeviceFailed as failure:
        raise StartupError(f"setting devices: {device.uuid} does not work: {failure}: {_REMEDY}") from None
    if is_mps_client and not settings.allow_mps:
        raise StartupError(
            f"setting allow_mps: the service uses device {device.uuid} through CUDA MPS, where one client's fault can "
            f"end them all: run it without MPS, or set allow_mps"
        )
    memory_bytes = _memory_bytes(device, settings, total_bytes)
    return {"name": device.name, "memory_bytes": memory_bytes, "piece_bytes": piece_bytes}


def _piece_bytes(device: Device, kind: ArenaKind) -> int:
    return ALLOCATION_BYTES if kind is ArenaKind.CUDA_IPC else granularity_bytes(device)


def _memory_bytes(device: Device, settings: Settings, total_bytes: int) -> int:
    """Returns what the setting `memory` comes to there.

    Neither an amount nor a share need be free now: workers of an earlier epoch may still have it, and let go when they
    find this one, and the budget is for all of the life that begins. Until then a pool that does not fit is refused.
    """
    if isinstance(settings.memory, Share):
        return settings.memory.of(total_bytes)
    if settings.memory > total_bytes:
        raise StartupError(
            f"setting memory: needs {exact_size(settings.memory)} of each device, {device.uuid} has "
            f"{exact_size(total_bytes)}: set less"
        )
    return settings.memory
