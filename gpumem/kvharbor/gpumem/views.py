"""Zero-copy views of blocks, for numpy, CuPy and torch.

Views are plain arrays and tensors over the mapped memory: they own nothing, cost no copy, and keep the
mapping from being closed while they live. Who may write to which block is the pool's affair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kvharbor.gpumem.arena import DeviceMapped, Mapped
from kvharbor.gpumem.bounds import check_block, check_layer
from kvharbor.gpumem.device_views import DeviceWindows
from kvharbor.gpumem.errors import ArenaClosed, ArenaUnfit, OutOfBounds, ViewUnavailable
from kvharbor.gpumem.host_views import HostWindows
from kvharbor.gpumem.layout import Descriptor, PlaneSpan
from kvharbor.gpumem.mapping import Mapping
from kvharbor.gpumem.plane import TOKEN_HEAD_DIM, DataType
from kvharbor.gpumem.windows import Window

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks, `[first_block, first_block + block_count)`."""

    first_block: int
    block_count: int


class BlockViews:
    """Makes views of one mapping by the addresses of one descriptor.

    Shapes are `[block, token, head, dim]`, indexed by block id (scratch blocks included), and
    `[token, head, dim]` for a run. Host memory has numpy arrays and device memory CuPy arrays, and asking for
    the other raises ViewUnavailable; both have torch tensors. Where numpy and CuPy have no such type (bfloat16:
    uint16, float8: uint8) their arrays show the raw bits.

    Of a read-only mapping numpy arrays are read-only. torch and CuPy know nothing of the kind: a store through
    one of theirs ends the process with SIGSEGV, on a device its CUDA context.

    Raises ArenaUnfit when the mapping is shorter than the descriptor. `close` before the mapping.
    """

    def __init__(self, mapping: Mapped, descriptor: Descriptor) -> None:
        if mapping.size_bytes < descriptor.size_bytes:
            raise ArenaUnfit(f"the mapping has {mapping.size_bytes}", size_bytes=descriptor.size_bytes)
        self.descriptor = descriptor
        self._windows: HostWindows | DeviceWindows | None = _windows_on(mapping, descriptor.size_bytes)

    def numpy(self, plane: str, layer: int) -> npt.NDArray[Any]:
        """Returns one layer of a plane in host memory, `[block, token, head, dim]`."""
        window = self._layer(plane, layer, view="numpy")
        return self._shown().numpy(window)

    def cupy(self, plane: str, layer: int) -> Any:
        """Returns one layer of a plane in device memory, `[block, token, head, dim]`, as a `cupy.ndarray`."""
        window = self._layer(plane, layer, view="cupy")
        return self._shown().cupy(window)

    def torch(self, plane: str, layer: int) -> "Tensor":
        """Returns one layer of a plane, `[block, token, head, dim]`, in the plane's own type."""
        window = self._layer(plane, layer, view="torch")
        return self._shown().torch(window)

    def numpy_run(self, plane: str, layer: int, first_block: int, block_count: int) -> npt.NDArray[Any]:
        """Returns neighbouring blocks of one layer in host memory as `[token, head, dim]`, contiguous.

        More than one block needs a layout in which neighbours touch (layer-major): elsewhere it raises
        ViewUnavailable, and a slice of `numpy(plane, layer)` is the strided view to take.
        """
        window = self._run(plane, layer, first_block, block_count)
        return self._shown().numpy(window)

    def cupy_run(self, plane: str, layer: int, first_block: int, block_count: int) -> Any:
        """Returns what `numpy_run` does, of device memory, as a `cupy.ndarray`."""
        window = self._run(plane, layer, first_block, block_count)
        return self._shown().cupy(window)

    def torch_run(self, plane: str, layer: int, first_block: int, block_count: int) -> "Tensor":
        """Returns what `numpy_run` does, as a tensor in the plane's own type."""
        window = self._run(plane, layer, first_block, block_count)
        return self._shown().torch(window)

    def page(self, plane: str, layer: int, block: int) -> Any:
        """Returns the raw bytes of one page, `[page_bytes]` of uint8; the one view that opaque interiors have.

        A numpy array of host memory, a `cupy.ndarray` of device memory.
        """
        first = self.descriptor.page_offset_bytes(plane, layer, block)
        page_bytes = self.descriptor.span(plane).plane.page_bytes
        return self._shown().raw(Window(plane, DataType.UINT8, first, (page_bytes,), (1,)))

    def torch_bytes(self) -> "Tensor":
        """Returns all blocks as one flat tensor, uint8 `[size_bytes]`, for engines that lay them out themselves."""
        size_bytes = self.descriptor.size_bytes
        return self._shown().torch(Window("of all", DataType.UINT8, 0, (size_bytes,), (1,)))

    def close(self) -> None:
        """Lets go of the mapping; views already handed out stay valid and keep the mapping open."""
        self._windows = None

    def _shown(self) -> HostWindows | DeviceWindows:
        if self._windows is None:
            raise ArenaClosed("set of views")
        return self._windows

    def _layer(self, plane: str, layer: int, *, view: str) -> Window:
        span = self._span(plane, layer, view=view)
        return _window(span, layer, 0, (self.descriptor.block_count, *self._page_shape(span)))

    def _run(self, plane: str, layer: int, first_block: int, block_count: int) -> Window:
        span = self._span(plane, layer, view="run")
        return _window(span, layer, first_block, self._run_shape(span, first_block, block_count))

    def _span(self, name: str, layer: int, *, view: str) -> PlaneSpan:
        span = self.descriptor.span(name)
        check_layer(layer, span.plane.layer_count)
        if span.plane.interior != TOKEN_HEAD_DIM:
            raise ViewUnavailable(
                view, name, f"its pages are {span.plane.interior!r} inside; take raw bytes with page()"
            )
        return span

    def _page_shape(self, span: PlaneSpan) -> tuple[int, int, int]:
        return self.descriptor.layout.block_tokens, span.plane.head_count, span.plane.head_dim

    def _run_shape(self, span: PlaneSpan, first_block: int, block_count: int) -> tuple[int, int, int]:
        check_block("first_block", first_block, self.descriptor.block_count)
        beyond = self.descriptor.block_count - first_block + 1
        if not 1 <= block_count < beyond:
            raise OutOfBounds(
                "block_count", block_count, least=1, limit=beyond, remedy="end the run with the descriptor's last block"
            )
        if block_count > 1 and span.block_stride_bytes != span.plane.page_bytes:
            raise ViewUnavailable(
                "run",
                span.plane.name,
                "its blocks do not touch in this order; slice numpy() or torch() (or cupy()), or use runs of one block",
            )
        tokens, heads, dims = self._page_shape(span)
        return block_count * tokens, heads, dims


def block_runs(table: Sequence[int] | npt.NDArray[np.integer[Any]]) -> list[Run]:
    """Cuts a block table into its runs of neighbouring ids, in table order. An empty table has none."""
    blocks = np.asarray(table, dtype=np.int64)
    if blocks.size == 0:
        return []
    starts = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) != 1)
    lengths = np.diff(starts, append=blocks.size)
    return [Run(first, count) for first, count in zip(blocks[starts].tolist(), lengths.tolist(), strict=True)]


def _windows_on(mapping: Mapped, size_bytes: int) -> HostWindows | DeviceWindows:
    if isinstance(mapping, Mapping):
        return HostWindows(mapping, size_bytes)
    return DeviceWindows(cast(DeviceMapped, mapping), size_bytes)


def _window(span: PlaneSpan, layer: int, block: int, shape: tuple[int, ...]) -> Window:
    offset_bytes = span.offset_bytes + layer * span.layer_stride_bytes + block * span.block_stride_bytes
    return Window(span.plane.name, span.plane.data_type, offset_bytes, shape, _strides(span, shape))


def _strides(span: PlaneSpan, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Byte strides of a view whose inner three axes are contiguous and whose fourth, if any, is the block."""
    heads, dims = shape[-2:]
    item_bytes = span.plane.data_type.itemsize
    inner = (heads * dims * item_bytes, dims * item_bytes, item_bytes)
    return inner if len(shape) == 3 else (span.block_stride_bytes, *inner)
