"""Handing the memory of a part to a process: whether it may have it, and what it needs to map it."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvharbor.gpumem import ArenaKind, DeviceNotVisible, Export
from kvharbor.gpumem.devices import same_device
from kvharbor.pool.errors import InvalidField
from kvharbor.server.memory.part import Part
from kvharbor.server.messages.layouts import device_memory_message
from kvharbor.server.pools.served_pool import ServedPool
from kvharbor.server.session_errors import MpsClientRefused
from kvharbor.server.sessions.members import Mode
from kvharbor.v1 import side_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Attachment:
    """Memory as it is handed to a worker. The descriptors are copies, to be closed once they are sent.

    A worker that does not read makes them wait, and the pool may be dropped meanwhile: its own numbers would by then
    be other files'.
    """

    message: side_pb2.SideResponse
    fds: tuple[int, ...]


def status_attachment(served: ServedPool) -> Attachment:
    """Returns what any member gets to read a pool's status page by."""
    attached = side_pb2.StatusAttached(pool_id=served.pool_id)
    return Attachment(side_pb2.SideResponse(status_attached=attached), (served.page.reading_descriptor(),))


def attachment(
    served: ServedPool, descriptor: types_pb2.PoolDescriptor, asked: side_pb2.Attach, mode: Mode, *, allow_mps: bool
) -> Attachment:
    """Returns what a member of that mode gets of the part it has asked for.

    Raises InvalidField for a part that the pool has not; for a part on a device, DeviceNotVisible and
    MpsClientRefused.
    """
    part = _part(served, asked.part)
    export = part.export
    if export.kind is ArenaKind.HOST:
        message = side_pb2.Attached(pool=descriptor, part=asked.part)
        return Attachment(side_pb2.SideResponse(attached=message), (_host_descriptor(export, mode),))
    _check_view(export.device, asked.device_view, allow_mps=allow_mps)
    memory = device_memory_message(export)
    message = side_pb2.Attached(pool=descriptor, part=asked.part, device_memory=memory)
    return Attachment(side_pb2.SideResponse(attached=message), _duplicates(export.fds))


def _part(served: ServedPool, part: int) -> Part:
    parts = served.memory.parts
    if not 0 <= part < len(parts):
        raise InvalidField(
            field="part",
            value=part,
            limit=f"0 to {len(parts) - 1}, the ranks of the pool's layout",
            remedy="attach the part of your rank, or open a pool with the right tp_size",
        )
    return parts[part]


def _host_descriptor(export: Export, mode: Mode) -> int:
    (fd,) = export.fds
    if mode is Mode.READ_WRITE:
        return os.dup(fd)
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def _check_view(device: str, view: side_pb2.DeviceView, *, allow_mps: bool) -> None:
    """Refuses a process whose death would not prove the end of its device work, or that could not map it [S29]."""
    if not any(same_device(device, visible) for visible in view.visible_devices):
        raise DeviceNotVisible(device, [visible[:64] for visible in view.visible_devices[:16]])
    if view.mps_client and not allow_mps:
        raise MpsClientRefused(device)


def _duplicates(fds: Sequence[int]) -> tuple[int, ...]:
    """Duplicates all of them, or none."""
    with contextlib.ExitStack() as undo:
        made = []
        for fd in fds:
            made.append(os.dup(fd))
            undo.callback(os.close, made[-1])
        undo.pop_all()
    return tuple(made)
