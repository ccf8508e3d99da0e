"""Windows on host memory: numpy arrays and torch tensors."""

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvharbor.gpumem.errors import ViewUnavailable
from kvharbor.gpumem.mapping import Mapping
from kvharbor.gpumem.windows import RAW_TYPES, TensorWindows, Window

if TYPE_CHECKING:
    from torch import Tensor


class HostWindows:
    """Shows the first `size_bytes` of a host mapping. It, and whatever it has shown, keeps the mapping open [M8]."""

    def __init__(self, mapping: Mapping, size_bytes: int) -> None:
        self._mapping = mapping
        self._bytes = np.frombuffer(mapping.buffer, dtype=np.uint8, count=size_bytes)
        self._tensors = TensorWindows()

    def numpy(self, window: Window) -> npt.NDArray[Any]:
        """Returns the window as an array, read-only for a read-only mapping."""
        return np.ndarray(
            window.shape,
            dtype=RAW_TYPES[window.data_type],
            buffer=self._bytes,
            offset=window.offset_bytes,
            strides=window.strides_bytes,
        )

    def cupy(self, window: Window) -> NoReturn:
        """Raises ViewUnavailable: CuPy's arrays lie on devices."""
        raise ViewUnavailable("cupy", window.plane, "its memory is the host's; use numpy or torch")

    def torch(self, window: Window) -> "Tensor":
        """Returns the window as a tensor, through which a store into a read-only mapping ends the process."""
        return self._tensors.show(window, self._flat_tensor)

    def raw(self, window: Window) -> npt.NDArray[Any]:
        """Returns the window as the array that this memory has."""
        return self.numpy(window)

    def _flat_tensor(self, _window: Window) -> "Tensor":
        import torch

        # torch keeps the object but not its buffer: only a memoryview in between stops the mapping from
        # being closed under a tensor [M8].
        guard = memoryview(self._mapping.region)
        return torch.frombuffer(guard, dtype=torch.uint8, count=self._bytes.nbytes)
