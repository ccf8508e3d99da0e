"""Plain device memory and its IPC handles by CuPy: the one file that touches CuPy's runtime API.

CuPy clears CUDA's last error before it raises, so that a refused export leaves none behind.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, Final

from kvharbor.gpumem.devices import Device
from kvharbor.gpumem.errors import CudaUnavailable, DeviceFailed

_REMEDIES: Final = {
    "cudaErrorInsufficientDriver": "install an NVIDIA driver, or one as new as CUDA {major}, or CuPy for an older CUDA",
    "cudaErrorStubLibrary": "take the driver's stub library out of the library path",
    "cudaErrorSystemDriverMismatch": "restart after the driver's update, so that kernel module and library match",
    "cudaErrorCompatNotSupportedOnDevice": "remove the CUDA compatibility package, or update the driver",
    "cudaErrorNoDevice": "let the process see a device (CUDA_VISIBLE_DEVICES, or the container's devices)",
}
"""Failures of the whole CUDA in this process, and what to do about each."""


def cuda_version_of_cupy() -> tuple[int, int]:
    """Returns the version of CUDA that CuPy brings along, (major, minor); asks no driver. Raises CudaUnavailable."""
    version: int = _cupy_cuda().runtime.runtimeGetVersion()
    return version // 1000, version % 1000 // 10


class CupyRuntime:
    """An IpcRuntime over CuPy. Raises CudaUnavailable where CuPy, a fitting driver or a device is missing."""

    def __init__(self) -> None:
        self._cuda = _cupy_cuda()
        with self._named("cudaGetDeviceCount"):
            self._cuda.runtime.getDeviceCount()

    def allocate(self, device: Device, size_bytes: int) -> int:
        # Not through CuPy's allocator, whose pools and limits the environment and other code can set.
        with self._calling("cudaMalloc", device) as runtime:
            return int(runtime.malloc(size_bytes))

    def free(self, device: Device, address: int) -> None:
        with self._calling("cudaFree", device) as runtime:
            runtime.free(address)

    def zero(self, device: Device, address: int, size_bytes: int) -> None:
        with self._calling("cudaMemset", device) as runtime:
            runtime.memset(address, 0, size_bytes)
        self.synchronise(device)

    def handle_of(self, device: Device, address: int) -> bytes:
        with self._calling("cudaIpcGetMemHandle", device) as runtime:
            return bytes(runtime.ipcGetMemHandle(address))

    def open(self, device: Device, handle: bytes) -> int:
        with self._calling("cudaIpcOpenMemHandle", device) as runtime:
            return int(runtime.ipcOpenMemHandle(handle))

    def close(self, device: Device, address: int) -> None:
        with self._calling("cudaIpcCloseMemHandle", device) as runtime:
            runtime.ipcCloseMemHandle(address)

    def synchronise(self, device: Device) -> None:
        with self._calling("cudaDeviceSynchronize", device) as runtime:
            runtime.deviceSynchronize()

    @contextlib.contextmanager
    def _calling(self, call: str, device: Device) -> Iterator[Any]:
        """Yields the runtime with the device current in this thread, as an earlier one is again afterwards."""
        with self._named("cudaSetDevice"), self._cuda.Device(device.ordinal), self._named(call):
            yield self._cuda.runtime

    @contextlib.contextmanager
    def _named(self, call: str) -> Iterator[None]:
        """Raises CuPy's errors as ours, under the name of the call."""
        try:
            yield
        except self._cuda.runtime.CUDARuntimeError as failure:
            code, _, detail = str(failure).partition(": ")
            if code not in _REMEDIES:
                raise DeviceFailed(call, code, detail) from failure
            major = self._cuda.runtime.runtimeGetVersion() // 1000
            raise CudaUnavailable(
                f"{call} failed with {code} ({detail})", _REMEDIES[code].format(major=major)
            ) from failure


def _cupy_cuda() -> Any:
    try:
        return importlib.import_module("cupy").cuda
    except ImportError as missing:
        raise CudaUnavailable(f"CuPy cannot be imported: {missing}", "pip install 'kvharbor[cuda]'") from missing
