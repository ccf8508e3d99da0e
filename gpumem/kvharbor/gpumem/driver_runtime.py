"""Plain device memory and its IPC handles by the driver API, in the device's primary context."""

from kvharbor.gpumem import driver
from kvharbor.gpumem.devices import Device, current


class DriverRuntime:
    """An IpcRuntime over `cuda.bindings`. Raises CudaUnavailable where the package, the driver or a device is missing.

    The driver API keeps no last error: a call that failed is forgotten when it has returned.
    """

    def __init__(self) -> None:
        driver.init()

    def allocate(self, device: Device, size_bytes: int) -> int:
        with current(device):
            return driver.mem_alloc(size_bytes)

    def free(self, device: Device, address: int) -> None:
        with current(device):
            driver.mem_free(address)

    def zero(self, device: Device, address: int, size_bytes: int) -> None:
        with current(device):
            driver.memset_async(address, 0, size_bytes, 0)
            driver.context_synchronize()

    def handle_of(self, device: Device, address: int) -> bytes:
        with current(device):
            return driver.ipc_get_handle(address)

    def open(self, device: Device, handle: bytes) -> int:
        with current(device):
            return driver.ipc_open_handle(handle)

    def close(self, device: Device, address: int) -> None:
        with current(device):
            driver.ipc_close_handle(address)

    def synchronise(self, device: Device) -> None:
        with current(device):
            driver.context_synchronize()
