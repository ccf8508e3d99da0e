"""The calls of the CUDA driver that kvharbor makes, one function each, with plain values and typed errors.

Handles of contexts, streams and allocations are ints, and so are device addresses. Functions that say "of the
current context" need one in the calling thread (`devices.current`); the others need `init` only. Nothing here
keeps state or frees by itself. `cuda.bindings` is imported by the first call, so that a host without a device
needs neither the package nor the library.
"""

import ctypes
import functools
import importlib
from types import ModuleType
from typing import Any

from kvharbor.gpumem.errors import CudaUnavailable, DeviceFailed

IPC_HANDLE_BYTES = 64


@functools.cache
def bindings() -> ModuleType:
    """Returns `cuda.bindings.driver`. Raises CudaUnavailable where the package is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ModuleNotFoundError as missing:
        raise CudaUnavailable(
            f"the Python package {missing.name} is not installed", "install kvharbor with the extra 'cuda'"
        ) from None


def call(function: str, *arguments: object) -> Any:
    """Calls one function of the driver; returns its result, a tuple if there are several, None if none.

    Raises CudaUnavailable where there is no driver library or it lacks the function, DeviceFailed where the call
    does not succeed.
    """
    library = bindings()
    entry = getattr(library, function)
    try:
        code, *results = entry(*arguments)
    except RuntimeError as failure:
        # The bindings load the library at the first call, and raise this or a kind of it where they cannot.
        raise CudaUnavailable(f"{function} cannot be called: {failure}", _DRIVER_REMEDY) from failure
    if code != library.CUresult.CUDA_SUCCESS:
        raise DeviceFailed(function, code.name, _text_of(code))
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


@functools.cache
def init() -> None:
    """Starts the driver in this process; repeated calls do nothing. Raises CudaUnavailable where it has no device."""
    try:
        call("cuInit", 0)
    except DeviceFailed as failure:
        raise CudaUnavailable(str(failure), _DRIVER_REMEDY) from failure


def driver_version() -> tuple[int, int]:
    """Returns the CUDA version that the driver speaks, (major, minor)."""
    version: int = call("cuDriverGetVersion")
    return version // 1000, version % 1000 // 10


# Devices, by their ordinal in this process.


def device_count() -> int:
    """Returns how many devices this process sees."""
    return int(call("cuDeviceGetCount"))


def device_uuid(ordinal: int) -> bytes:
    """Returns the 16 bytes of a device's UUID; of a MIG device its own."""
    uuid = call("cuDeviceGetUuid", ordinal)
    # Through the pointer: the binding's `bytes` attribute is text of C, which a zero byte would end.
    return ctypes.string_at(uuid.getPtr(), 16)


def device_name(ordinal: int) -> str:
    """Returns the name of a device's model."""
    name: bytes = call("cuDeviceGetName", 256, ordinal)
    return name.split(b"\0", 1)[0].decode(errors="replace")


def device_total_bytes(ordinal: int) -> int:
    """Returns the size of a device's memory."""
    return int(call("cuDeviceTotalMem", ordinal))


def device_attribute(name: str, ordinal: int) -> int:
    """Returns an attribute of a device; `name` is that of the driver's enum without CU_DEVICE_ATTRIBUTE_."""
    attribute = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", attribute, ordinal))


def peer_access(ordinal: int, other: int) -> bool:
    """Whether one device can read and write the memory of another."""
    return bool(call("cuDeviceCanAccessPeer", ordinal, other))


# Contexts.


def primary_context_retain(ordinal: int) -> int:
    """Returns the primary context of a device, and makes it if nobody has; release it as often."""
    return int(call("cuDevicePrimaryCtxRetain", ordinal))


def primary_context_release(ordinal: int) -> None:
    """Gives back one retained primary context; the last one ends it."""
    call("cuDevicePrimaryCtxRelease", ordinal)


def context_push(context: int) -> None:
    """Makes a context current in this thread until it is popped."""
    call("cuCtxPushCurrent", bindings().CUcontext(context))


def context_pop() -> None:
    """Takes the current context from this thread, whose earlier one is current again."""
    call("cuCtxPopCurrent")


def context_device() -> int:
    """Returns the ordinal of the device of the current context."""
    return int(call("cuCtxGetDevice"))


def context_synchronize() -> None:
    """Waits for all the work of the current context."""
    call("cuCtxSynchronize")


# Plain allocations and CUDA IPC.


def mem_get_info() -> tuple[int, int]:
    """Returns (free, total) bytes of the current context's device."""
    free_bytes, total_bytes = call("cuMemGetInfo")
    return int(free_bytes), int(total_bytes)


def mem_alloc(size_bytes: int) -> int:
    """Allocates memory on the current context's device; returns its address, the caller's to free."""
    return int(call("cuMemAlloc", size_bytes))


def mem_free(address: int) -> None:
    """Frees what `mem_alloc` has returned."""
    call("cuMemFree", address)


def ipc_get_handle(address: int) -> bytes:
    """Returns the handle, 64 bytes, by which other processes open the allocation that begins at `address`."""
    handle = call("cuIpcGetMemHandle", address)
    return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)


def ipc_open_handle(content: bytes) -> int:
    """Maps another process's allocation into the current context, with peer access if need be; returns its address."""
    if len(content) != IPC_HANDLE_BYTES:
        raise ValueError(f"an IPC handle has {IPC_HANDLE_BYTES} bytes, this has {len(content)}")
    library = bindings()
    handle = library.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), content, IPC_HANDLE_BYTES)
    lazily = library.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(call("cuIpcOpenMemHandle", handle, int(lazily)))


def ipc_close_handle(address: int) -> None:
    """Unmaps what `ipc_open_handle` has returned, in the context that it was opened in."""
    call("cuIpcCloseMemHandle", address)


# Virtual memory management: physical memory by handle or descriptor, address ranges apart from it.


def granularity_bytes(ordinal: int) -> int:
    """Returns what sizes of shareable physical memory on a device, and addresses of it, are to be multiples of."""
    recommended = bindings().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(call("cuMemGetAllocationGranularity", _shareable_memory(ordinal), recommended))


def mem_create(size_bytes: int, ordinal: int) -> int:
    """Takes physical memory that can be exported as a descriptor; returns its handle, the caller's to release."""
    return int(call("cuMemCreate", size_bytes, _shareable_memory(ordinal), 0))


def mem_export_fd(handle: int) -> int:
    """Returns a descriptor of physical memory, the caller's to close; it keeps the memory as the handle does."""
    return int(call("cuMemExportToShareableHandle", handle, _posix_descriptor(), 0))


def mem_import_fd(fd: int) -> int:
    """Returns a handle of the physical memory behind a descriptor, which stays the caller's; release the handle."""
    return int(call("cuMemImportFromShareableHandle", fd, _posix_descriptor()))


def mem_release(handle: int) -> None:
    """Gives back a handle; the memory lives until its last handle, descriptor and mapping is gone."""
    call("cuMemRelease", handle)


def address_reserve(size_bytes: int, alignment_bytes: int) -> int:
    """Reserves a range of device addresses without memory; returns where it begins, the caller's to free."""
    return int(call("cuMemAddressReserve", size_bytes, alignment_bytes, 0, 0))


def address_free(address: int, size_bytes: int) -> None:
    """Gives back a range of addresses in which nothing is mapped."""
    call("cuMemAddressFree", address, size_bytes)


def mem_map(address: int, size_bytes: int, handle: int) -> None:
    """Maps the whole memory behind a handle at an address of a reserved range; nobody has access yet."""
    call("cuMemMap", address, size_bytes, 0, handle, 0)


def mem_unmap(address: int, size_bytes: int) -> None:
    """Unmaps exactly what one `mem_map` has mapped. The caller knows that nothing is at work on it."""
    call("cuMemUnmap", address, size_bytes)


def set_access(address: int, size_bytes: int, ordinal: int, *, writable: bool) -> None:
    """Lets a device read a fully mapped range, or read and write it."""
    library = bindings()
    access = library.CUmemAccessDesc()
    access.location.type = library.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    flags = library.CUmemAccess_flags
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    call("cuMemSetAccess", address, size_bytes, [access], 1)


# Streams of the current context, and what is queued on them; stream 0 is the default one.


def stream_create() -> int:
    """Makes a stream that does not wait for the default one; returns it, the caller's to destroy."""
    nonblocking = bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
    return int(call("cuStreamCreate", int(nonblocking)))


def stream_synchronize(stream: int) -> None:
    """Waits until all that is queued on a stream is done; errors of that work are raised here."""
    call("cuStreamSynchronize", stream)


def stream_destroy(stream: int) -> None:
    """Gives back a stream; what is queued on it is still done."""
    call("cuStreamDestroy", stream)


def memcpy_async(destination: int, source: int, size_bytes: int, stream: int) -> None:
    """Queues a copy from one device address to another."""
    call("cuMemcpyDtoDAsync", destination, source, size_bytes, stream)


def memcpy_2d_async(
    destination: int, source: int, *, width_bytes: int, height: int, pitch_bytes: int, stream: int
) -> None:
    """Queues a copy of `height` rows, each `width_bytes`, that begin `pitch_bytes` apart on both sides."""
    library = bindings()
    plan = library.CUDA_MEMCPY2D()
    plan.srcMemoryType = plan.dstMemoryType = library.CUmemorytype.CU_MEMORYTYPE_DEVICE
    plan.srcDevice, plan.dstDevice = source, destination
    plan.srcPitch = plan.dstPitch = pitch_bytes
    plan.WidthInBytes, plan.Height = width_bytes, height
    call("cuMemcpy2DAsync", plan, stream)


def memset_async(address: int, value: int, size_bytes: int, stream: int) -> None:
    """Queues the setting of bytes to `value`."""
    call("cuMemsetD8Async", address, value, size_bytes, stream)


def read_bytes(address: int, size_bytes: int) -> bytes:
    """Returns bytes of the device, copied to the host; waits for the default stream."""
    content = bytearray(size_bytes)
    call("cuMemcpyDtoH", (ctypes.c_char * size_bytes).from_buffer(content), address, size_bytes)
    return bytes(content)


def write_bytes(address: int, content: bytes) -> None:
    """Copies bytes of the host to the device; waits for the default stream."""
    call("cuMemcpyHtoD", address, content, len(content))


_DRIVER_REMEDY = (
    "use a machine with an NVIDIA device and driver (a container needs the runtime of NVIDIA and a device "
    "assigned), or the arena 'host'; kvharbor doctor tells more"
)


def _text_of(code: Any) -> str:
    """What the driver has to say on a result, for people; empty where it says nothing."""
    known, text = bindings().cuGetErrorString(code)
    return text.decode() if known == bindings().CUresult.CUDA_SUCCESS and text else ""


def _shareable_memory(ordinal: int) -> Any:
    """The driver's description of memory on a device that can be exported as a descriptor."""
    library = bindings()
    memory = library.CUmemAllocationProp()
    memory.type = library.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    memory.location.type = library.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    memory.location.id = ordinal
    memory.requestedHandleTypes = _posix_descriptor()
    return memory


def _posix_descriptor() -> Any:
    return bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
