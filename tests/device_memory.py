"""Memory on devices as a worker has it, without the client library: attached by hand, read and written by block."""

import os
import socket
from collections.abc import Sequence
from typing import cast

from kvharbor.gpumem import ArenaKind, DeviceMapped, Export, attach, driver, visible_devices
from kvharbor.gpumem.devices import current
from kvharbor.v1 import side_pb2
from raw_caller import BLOCK_BYTES, ask, attaching


class DeviceBlocks:
    """One part of a pool, mapped in this process."""

    def __init__(self, mapped: DeviceMapped) -> None:
        self.mapped = mapped

    def write(self, block: int, content: bytes) -> None:
        """Stores the bytes of a block."""
        with current(self.mapped.device):
            driver.write_bytes(self.mapped.address + block * BLOCK_BYTES, content)

    def read(self, block: int) -> bytes:
        """Returns the bytes of a block."""
        with current(self.mapped.device):
            return driver.read_bytes(self.mapped.address + block * BLOCK_BYTES, BLOCK_BYTES)


def view(**fields: bool) -> side_pb2.DeviceView:
    """Returns what this process can say of devices."""
    return side_pb2.DeviceView(visible_devices=[device.uuid for device in visible_devices()], **fields)


def attached(side: socket.socket, pool_id: str, part: int = 0) -> DeviceBlocks:
    """Asks for a part on a side socket and maps it."""
    response, fds = ask(side, attaching(pool_id, part=part, device_view=view()))
    assert response.HasField("attached"), response
    try:
        return DeviceBlocks(cast(DeviceMapped, attach(export_of(response.attached, fds))))
    finally:
        for fd in fds:
            os.close(fd)


def export_of(message: side_pb2.Attached, fds: Sequence[int]) -> Export:
    """Returns what `attach` wants."""
    memory = message.device_memory
    return Export(
        kind=ArenaKind(message.pool.arena_kind),
        size_bytes=message.pool.size_bytes,
        fds=tuple(fds),
        device=memory.device,
        offset_bytes=memory.offset_bytes,
        ipc_handle=memory.ipc_handle,
        exporter_pid=memory.exporter_pid,
        chunk_bytes=tuple(memory.chunk_bytes),
    )
