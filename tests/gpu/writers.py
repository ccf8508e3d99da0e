"""Writers that never stop by themselves soon: what a worker's kernels are when it is killed.

Each keeps storing the time into slots at the beginning of an arena. So the last value there tells when its last store
was, however late somebody looks. A kernel stores the device's clock, a thread of the host its own: whoever watches
finds out how the two differ.
"""

import ctypes
import enum
import itertools
import threading
import time
from collections.abc import MutableSequence
from typing import Any, cast

from kvharbor.gpumem import DeviceMapped, Mapped, Mapping

SLOT_BYTES = 8
MOST_S = 20
"""So long writes a kernel that nobody kills: no test may leave a device busy for ever."""


class Load(enum.StrEnum):
    """How much a killed worker has on the device."""

    ONE_THREAD = "one_thread"
    """One thread of one kernel."""
    WHOLE_DEVICE = "whole_device"
    """Kernels of as many blocks as the device runs at a time, one running and the others queued behind it."""


_QUEUED = 40

# volatile: each store leaves the kernel. globaltimer: nanoseconds, the same for all blocks of a device.
_KERNEL = r"""
extern "C" __global__ void keep_storing(unsigned long long* slots, unsigned long long run_ns)
{
    unsigned long long began, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        ((volatile unsigned long long*)slots)[blockIdx.x] = now;
    } while (now - began < run_ns);
}

extern "C" __global__ void store_once(unsigned char* place)
{
    *place = 1;
}
"""


def start_kernel(mapped: DeviceMapped, load: Load) -> int:
    """Launches kernels that store; returns how many slots they fill. Needs a real device."""
    import cupy
    import numpy as np

    with cupy.cuda.Device(mapped.device.ordinal) as device:
        one = load is Load.ONE_THREAD
        slot_count = 1 if one else 4 * int(device.attributes["MultiProcessorCount"])
        launches, threads = (1, 1) if one else (_QUEUED, 256)
        arguments = np.uint64(mapped.address), np.uint64(MOST_S * 10**9 // launches)
        for _ in range(launches):
            _kernel("keep_storing")((slot_count,), (threads,), arguments)
    return slot_count


def start_thread(mapped: Mapped) -> int:
    """Starts a thread that stores into one slot, where memory is the host's or the stub's; returns 1."""
    slots = _host_slots(mapped)

    def store() -> None:
        for _ in itertools.count():
            slots[0] = time.monotonic_ns()

    threading.Thread(target=store, daemon=True).start()
    return 1


def store_by_kernel(mapped: DeviceMapped) -> None:
    """Stores into the first byte by a kernel, and waits for it. Raises CuPy's CUDARuntimeError."""
    import cupy
    import numpy as np

    with cupy.cuda.Device(mapped.device.ordinal) as device:
        _kernel("store_once")((1,), (1,), (np.uint64(mapped.address),))
        device.synchronize()


def _kernel(name: str) -> Any:
    import cupy

    return cupy.RawKernel(_KERNEL, name)


def _host_slots(mapped: Mapped) -> MutableSequence[int]:
    if isinstance(mapped, Mapping):
        return cast("MutableSequence[int]", mapped.buffer[:SLOT_BYTES].cast("Q"))
    # On the stub a device address is one of the process.
    return (ctypes.c_uint64 * 1).from_address(cast(DeviceMapped, mapped).address)  # type: ignore[return-value]
