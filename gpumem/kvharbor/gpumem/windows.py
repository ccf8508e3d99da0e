"""What a view shows of flat memory, and the tensors that show it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvharbor.gpumem.errors import ViewUnavailable
from kvharbor.gpumem.plane import DataType

if TYPE_CHECKING:
    from torch import Tensor

RAW_TYPES: Final[dict[DataType, type[np.generic]]] = {
    DataType.FLOAT32: np.float32,
    DataType.FLOAT16: np.float16,
    DataType.BFLOAT16: np.uint16,
    DataType.FLOAT8_E4M3: np.uint8,
    DataType.FLOAT8_E5M2: np.uint8,
    DataType.UINT8: np.uint8,
}
"""numpy and CuPy have no bfloat16 and no float8: their views show the raw bits."""


@dataclass(frozen=True, slots=True)
class Window:
    """Elements of one type in flat memory: the first at `offset_bytes`, the others by `strides_bytes`."""

    plane: str
    data_type: DataType
    offset_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]


class TensorWindows:
    """Tensors over flat uint8 ones, a flat one for each type; they keep alive whatever the flat one keeps alive."""

    def __init__(self) -> None:
        self._flat: dict[DataType, Tensor] = {}

    def show(self, window: Window, make_flat: Callable[[Window], "Tensor"]) -> "Tensor":
        """Returns the window as a tensor of the plane's own type; `make_flat` is called for the first of a type.

        Raises ViewUnavailable without torch.
        """
        flat = self._flat.get(window.data_type)
        if flat is None:
            flat = self._flat[window.data_type] = _typed(window, make_flat)
        item_bytes = window.data_type.itemsize
        return flat.as_strided(
            window.shape,
            [stride // item_bytes for stride in window.strides_bytes],
            window.offset_bytes // item_bytes,
        )


def _typed(window: Window, make_flat: Callable[[Window], "Tensor"]) -> "Tensor":
    try:
        import torch
    except ModuleNotFoundError as missing:
        raise ViewUnavailable("torch", window.plane, "torch is not installed; install it or use arrays") from missing
    return make_flat(window).view(getattr(torch, window.data_type.value))
