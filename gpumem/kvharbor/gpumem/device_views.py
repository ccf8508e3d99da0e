"""Windows on device memory: CuPy arrays and torch tensors. Both packages are imported at the first use only."""

from typing import TYPE_CHECKING, Any, NoReturn

from kvharbor.gpumem.arena import DeviceMapped
from kvharbor.gpumem.errors import ViewUnavailable
from kvharbor.gpumem.plane import DataType
from kvharbor.gpumem.windows import RAW_TYPES, TensorWindows, Window

if TYPE_CHECKING:
    from torch import Tensor


class DeviceWindows:
    """Shows the first `size_bytes` of a device mapping. It, and whatever it has shown, keeps the mapping open [M8]."""

    def __init__(self, mapping: DeviceMapped, size_bytes: int) -> None:
        self._device = mapping.device
        self._address = mapping.address
        self._size_bytes = size_bytes
        self._guard = mapping.borrow()
        self._memory: Any = None
        self._tensors = TensorWindows()

    def numpy(self, window: Window) -> NoReturn:
        """Raises ViewUnavailable: numpy's arrays lie on the host."""
        raise ViewUnavailable(
            "numpy",
            window.plane,
            f"its memory is on device {self._device.uuid}; use cupy or torch, whose get() and cpu() copy to the host",
        )

    def cupy(self, window: Window) -> Any:
        """Returns the window as a `cupy.ndarray`. Raises ViewUnavailable without CuPy. Asks nothing of the device."""
        try:
            import cupy
        except ImportError as missing:
            raise ViewUnavailable("cupy", window.plane, f"{missing}; pip install 'kvharbor[cuda]'") from missing
        if self._memory is None:
            self._memory = cupy.cuda.UnownedMemory(
                self._address, self._size_bytes, self._guard, device_id=self._device.ordinal
            )
        first = cupy.cuda.MemoryPointer(self._memory, window.offset_bytes)
        return cupy.ndarray(window.shape, dtype=RAW_TYPES[window.data_type], memptr=first, strides=window.strides_bytes)

    def torch(self, window: Window) -> "Tensor":
        """Returns the window as a tensor on the same device. Raises ViewUnavailable where torch has no CUDA."""
        return self._tensors.show(window, self._flat_tensor)

    def raw(self, window: Window) -> Any:
        """Returns the window as the array that this memory has."""
        return self.cupy(window)

    def _flat_tensor(self, window: Window) -> "Tensor":
        import torch

        if not torch.cuda.is_available():
            raise ViewUnavailable(
                "torch", window.plane, f"torch {torch.__version__} sees no CUDA device; install a build for CUDA"
            )
        # As bytes: CuPy knows neither bfloat16 nor float8, and torch cannot read the former from its interface.
        flat = Window(window.plane, DataType.UINT8, 0, (self._size_bytes,), (1,))
        return torch.utils.dlpack.from_dlpack(self.cupy(flat))
