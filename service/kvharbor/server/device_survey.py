"""Looks at the devices when a life of the service's state begins: which pools may lie on, and how much each gives."""

from collections.abc import Sequence

from kvharbor.gpumem import CudaUnavailable, Device, DeviceFailed, DeviceNotVisible, mps_client, visible_devices
from kvharbor.gpumem.devices import memory_of, release_context
from kvharbor.server.errors import StartupError
from kvharbor.server.life import DeviceShare
from kvharbor.server.settings import Settings
from kvharbor.server.sizes import Share


def surveyed(settings: Settings) -> dict[str, DeviceShare]:
    """Returns what each device gives to pools, by UUID; blocks, as it makes a context on each for a moment.

    Raises StartupError where there is no CUDA, no such device, less memory on one than is set, or where this process
    is itself a client of MPS.
    """
    try:
        return {device.uuid: _share(device, settings) for device in _chosen(settings.devices)}
    except (CudaUnavailable, DeviceNotVisible) as refused:
        raise StartupError(f"setting arena ({settings.arena_kind}): {refused}") from None


def _chosen(uuids: Sequence[str]) -> tuple[Device, ...]:
    visible = visible_devices()
    by_uuid = {device.uuid: device for device in visible}
    for uuid in uuids:
        if uuid not in by_uuid:
            raise DeviceNotVisible(uuid, [*by_uuid])
    return tuple(by_uuid[uuid] for uuid in uuids) or visible


def _share(device: Device, settings: Settings) -> DeviceShare:
    if mps_client(device) and not settings.allow_mps:
        raise StartupError(
            f"setting allow_mps: the service uses device {device.uuid} through CUDA MPS, where one client's fault can "
            f"end them all: run it without MPS, or set allow_mps"
        )
    try:
        memory = memory_of(device)
        release_context(device)
    except DeviceFailed as failure:
        remedy = "see `kvharbor doctor`, name other devices, or set the arena host"
        raise StartupError(f"setting devices: {device.uuid} does not work: {failure}: {remedy}") from None
    return {"name": device.name, "memory_bytes": _memory_bytes(device, settings, memory.free_bytes, memory.total_bytes)}


def _memory_bytes(device: Device, settings: Settings, free_bytes: int, total_bytes: int) -> int:
    """Returns what the setting `memory` comes to there.

    An amount need not be free now: workers of an earlier epoch may still have it, and let go when they find this one.
    Until then a pool that does not fit is refused.
    """
    if isinstance(settings.memory, Share):
        return settings.memory.of(free_bytes)
    if settings.memory > total_bytes:
        raise StartupError(
            f"setting memory: needs {settings.memory} bytes of each device, {device.uuid} has {total_bytes}: set less"
        )
    return settings.memory
