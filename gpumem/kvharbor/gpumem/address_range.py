"""Device addresses that are reserved apart from the memory in them, which can go and be replaced."""

import contextlib
from collections.abc import Sequence
from typing import Self

from kvharbor.gpumem import driver
from kvharbor.gpumem.devices import Device


class AddressRange:
    """`reserved_bytes` of a device's addresses from `address` on, with chunks of memory mapped from its beginning on.

    Owned by its maker until `free`. Nothing here knows whether somebody is at work on the memory.
    """

    def __init__(self, device: Device, address: int, reserved_bytes: int, *, writable: bool) -> None:
        self.device = device
        self.address = address
        self.reserved_bytes = reserved_bytes
        self.writable = writable
        self.chunk_bytes: list[int] = []

    @classmethod
    def reserve(cls, device: Device, size_bytes: int, *, granularity_bytes: int, writable: bool) -> Self:
        """Takes at least `size_bytes` of addresses, in multiples of the granularity; no memory."""
        reserved_bytes = -(-size_bytes // granularity_bytes) * granularity_bytes
        address = driver.address_reserve(reserved_bytes, granularity_bytes)
        return cls(device, address, reserved_bytes, writable=writable)

    def map(self, handles: Sequence[int], chunk_bytes: Sequence[int]) -> None:
        """Maps the memory behind handles after what is mapped; all of it or, raising DeviceFailed, none [M15]."""
        first = begin = self.address + sum(self.chunk_bytes)
        with contextlib.ExitStack() as undo:
            for handle, size_bytes in zip(handles, chunk_bytes, strict=True):
                driver.mem_map(begin, size_bytes, handle)
                undo.callback(driver.mem_unmap, begin, size_bytes)
                begin += size_bytes
            if begin > first:
                driver.set_access(first, begin - first, self.device.ordinal, writable=self.writable)
            undo.pop_all()
        self.chunk_bytes += chunk_bytes

    def unmap(self, *, first_chunk: int = 0) -> None:
        """Unmaps the chunks from `first_chunk` on, the last one first; those before a DeviceFailed are gone."""
        while len(self.chunk_bytes) > first_chunk:
            size_bytes = self.chunk_bytes[-1]
            driver.mem_unmap(self.address + sum(self.chunk_bytes) - size_bytes, size_bytes)
            self.chunk_bytes.pop()

    def free(self) -> None:
        """Unmaps what is mapped and gives the addresses back."""
        self.unmap()
        driver.address_free(self.address, self.reserved_bytes)
