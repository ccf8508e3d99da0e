"""A stamp: a few bytes at the very end of an arena, by which one process shows another that both have the same memory.

The end, because a mapping that is short, or lacks its last chunk, would show at no other place.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, Protocol, cast

from kvharbor.gpumem import driver
from kvharbor.gpumem.arena import ArenaKind, DeviceMapped, Export, Mapped
from kvharbor.gpumem.devices import Device, current
from kvharbor.gpumem.mapping import Mapping

STAMP_BYTES: Final = 64


class StampPlace(Protocol):
    """Where the stamp of one mapped arena is."""

    def read(self) -> bytes: ...

    def write(self, stamp: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class HostPlace:
    """The last bytes of a mapped host arena."""

    mapping: Mapping

    def read(self) -> bytes:
        """Returns the stamp."""
        with self.mapping.buffer as buffer:
            return bytes(buffer[-STAMP_BYTES:])

    def write(self, stamp: bytes) -> None:
        """Stores the stamp."""
        with self.mapping.buffer as buffer:
            buffer[-STAMP_BYTES:] = stamp


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Device memory at an address of this process. Raises DeviceFailed."""

    device: Device
    address: int

    @classmethod
    def at_end(cls, device: Device, address: int, size_bytes: int) -> "DevicePlace":
        """The last bytes of an arena that begins at `address`."""
        return cls(device, address + size_bytes - STAMP_BYTES)

    def read(self) -> bytes:
        """Returns the stamp."""
        with current(self.device):
            return driver.read_bytes(self.address, STAMP_BYTES)

    def write(self, stamp: bytes) -> None:
        """Stores the stamp and waits until the device has it: the call alone only waits for the host's bytes."""
        with current(self.device):
            driver.write_bytes(self.address, stamp)
            driver.context_synchronize()


def place_in(mapped: Mapped) -> StampPlace:
    """Returns where the stamp of a mapped arena is."""
    if isinstance(mapped, Mapping):
        return HostPlace(mapped)
    on_device = cast(DeviceMapped, mapped)
    return DevicePlace.at_end(on_device.device, on_device.address, on_device.size_bytes)


def answer_to(stamp: bytes) -> bytes:
    """Returns what the reader of a stamp writes in its place: each of its bits turned round."""
    return bytes(byte ^ 0xFF for byte in stamp)


def export_message(export: Export) -> bytes:
    """Returns an export as a message; its descriptors travel beside it, in order."""
    fields = {**asdict(export), "ipc_handle": export.ipc_handle.hex()}
    del fields["fds"]
    return json.dumps(fields).encode()


def export_of(message: bytes, fds: Sequence[int]) -> Export:
    """Returns the export of a message of the project's own and the descriptors that came with it."""
    fields = json.loads(message)
    return Export(
        **{
            **fields,
            "kind": ArenaKind(fields["kind"]),
            "ipc_handle": bytes.fromhex(fields["ipc_handle"]),
            "chunk_bytes": tuple(fields["chunk_bytes"]),
            "fds": tuple(fds),
        }
    )
