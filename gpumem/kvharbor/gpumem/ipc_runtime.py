"""What the cuda_ipc arena asks of CUDA, and who can give it.

CuPy's runtime API and the driver API both can, and share the device's primary context. Which one does is a
setting and never a fallback: a CuPy that does not work has to be seen, not worked around.
"""

import functools
import os
from typing import Final, Protocol

from kvharbor.gpumem.devices import Device
from kvharbor.gpumem.errors import CudaRuntimeUnknown

RUNTIME_VARIABLE: Final = "KVHARBOR_CUDA_RUNTIME"
RUNTIMES: Final = ("cupy", "driver")
"""The first is the default."""


class IpcRuntime(Protocol):
    """Plain device memory and its IPC handles. Calls block, and may be made from any thread.

    Addresses are device addresses of this process. Each call raises DeviceFailed with the name and the code of the
    call of CUDA that failed, and leaves no error behind for others to find.
    """

    def allocate(self, device: Device, size_bytes: int) -> int:
        """Returns the address of new memory, the caller's to free, of the one kind that can be exported.

        Whatever allocators and pools the process's environment asks of CuPy or torch, this is plain cudaMalloc.
        """
        ...

    def free(self, device: Device, address: int) -> None:
        """Frees what `allocate` has returned; undefined while another process has it open."""
        ...

    def zero(self, device: Device, address: int, size_bytes: int) -> None:
        """Sets the memory to zeros, and returns when it is done."""
        ...

    def handle_of(self, device: Device, address: int) -> bytes:
        """Returns the 64 bytes by which other processes open the allocation that begins at `address`."""
        ...

    def open(self, device: Device, handle: bytes) -> int:
        """Maps another process's allocation, some 26 ms for 2 GB; returns its address, the caller's to close."""
        ...

    def close(self, device: Device, address: int) -> None:
        """Unmaps what `open` has returned."""
        ...

    def synchronise(self, device: Device) -> None:
        """Waits for all the work that this process has queued on the device."""
        ...


def runtime_of(name: str | None = None) -> IpcRuntime:
    """Returns the runtime "cupy" or "driver"; None: as KVHARBOR_CUDA_RUNTIME says, "cupy" without it.

    Raises CudaRuntimeUnknown for another name, CudaUnavailable where this one cannot work here.
    """
    chosen = name or os.environ.get(RUNTIME_VARIABLE) or RUNTIMES[0]
    if chosen not in RUNTIMES:
        raise CudaRuntimeUnknown(chosen, known_runtimes=", ".join(RUNTIMES), variable=RUNTIME_VARIABLE)
    return _made(chosen)


@functools.cache
def _made(name: str) -> IpcRuntime:
    # Here, as each needs a package that the other does not.
    if name == "driver":
        from kvharbor.gpumem.driver_runtime import DriverRuntime

        return DriverRuntime()
    from kvharbor.gpumem.cupy_runtime import CupyRuntime

    return CupyRuntime()
