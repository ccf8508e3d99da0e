"""Zero-copy views of blocks, for numpy and torch.

Views are plain arrays and tensors over the mapped memory: they own nothing, cost no copy, and keep the
mapping from being closed while they live. Who may write to which block is the pool's affair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvharbor.gpumem.bounds import check_bounds
from kvharbor.gpumem.errors import ArenaClosed, ArenaUnfit, OutOfBounds, ViewUnavailable
from kvharbor.gpumem.layout import Descriptor, PlaneSpan
from kvharbor.gpumem.mapping import Mapping
from kvharbor.gpumem.plane import TOKEN_HEAD_DIM, DataType, Plane

if TYPE_CHECKING:
    from torch import Tensor

# numpy has no bfloat16 and no float8: their views show the raw bits.
_NUMPY_TYPES: dict[DataType, type[np.generic]] = {
    DataType.FLOAT32: np.float32,
    DataType.FLOAT16: np.float16,
    DataType.BFLOAT16: np.uint16,
    DataType.FLOAT8_E4M3: np.uint8,
    DataType.FLOAT8_E5M2: np.uint8,
    DataType.UINT8: np.uint8,
}


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks, `[first_block, first_block + block_count)`."""

    first_block: int
    block_count: int


class BlockViews:
    """Makes views of one mapping by the addresses of one descriptor.

    Shapes are `[block, token, head, dim]`, indexed by block id (scratch blocks included), and
    `[token, head, dim]` for a run. Of a read-only mapping numpy arrays are read-only; torch knows no
    read-only tensors, so a store through one of those ends the process with SIGSEGV. Where numpy has no
    such type (bfloat16: uint16, float8: uint8) its arrays show the raw bits.

    Raises ArenaUnfit when the mapping is shorter than the descriptor. `close` before the mapping.
    """

    def __init__(self, mapping: Mapping, descriptor: Descriptor) -> None:
        if mapping.size_bytes < descriptor.size_bytes:
            raise ArenaUnfit(f"the mapping has {mapping.size_bytes}", size_bytes=descriptor.size_bytes)
        self.descriptor = descriptor
        self._mapping = mapping
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(
            mapping.buffer, dtype=np.uint8, count=descriptor.size_bytes
        )
        self._tensors: dict[DataType, Tensor] = {}

    def numpy(self, plane: str, layer: int) -> npt.NDArray[Any]:
        """Returns one layer of a plane, `[block, token, head, dim]`."""
        span = self._span(plane, layer, view="numpy")
        return self._array(span, layer, 0, (self.descriptor.block_count, *self._page_shape(span)))

    def torch(self, plane: str, layer: int) -> "Tensor":
        """Returns one layer of a plane, `[block, token, head, dim]`, in the plane's own type."""
        span = self._span(plane, layer, view="torch")
        return self._tensor(span, layer, 0, (self.descriptor.block_count, *self._page_shape(span)))

    def numpy_run(self, plane: str, layer: int, first_block: int, block_count: int) -> npt.NDArray[Any]:
        """Returns neighbouring blocks of one layer as `[token, head, dim]`, contiguous.

        More than one block needs a layout in which neighbours touch (layer-major): elsewhere it raises
        ViewUnavailable, and a slice of `numpy(plane, layer)` is the strided view to take.
        """
        span = self._span(plane, layer, view="run")
        shape = self._run_shape(span, first_block, block_count)
        return self._array(span, layer, first_block, shape)

    def torch_run(self, plane: str, layer: int, first_block: int, block_count: int) -> "Tensor":
        """Returns what `numpy_run` does, as a tensor in the plane's own type."""
        span = self._span(plane, layer, view="run")
        shape = self._run_shape(span, first_block, block_count)
        return self._tensor(span, layer, first_block, shape)

    def page(self, plane: str, layer: int, block: int) -> npt.NDArray[np.uint8]:
        """Returns the raw bytes of one page, `[page_bytes]`; the one view that opaque interiors have."""
        first = self.descriptor.page_offset_bytes(plane, layer, block)
        return self._flat()[first : first + self.descriptor.span(plane).plane.page_bytes]

    def close(self) -> None:
        """Lets go of the mapping; views already handed out stay valid and keep the mapping open."""
        self._bytes = None
        self._tensors.clear()

    def _flat(self) -> npt.NDArray[np.uint8]:
        if self._bytes is None:
            raise ArenaClosed("set of views")
        return self._bytes

    def _span(self, name: str, layer: int, *, view: str) -> PlaneSpan:
        span = self.descriptor.span(name)
        check_bounds("layer", layer, span.plane.layer_count)
        if span.plane.interior != TOKEN_HEAD_DIM:
            raise ViewUnavailable(
                view, name, f"its pages are {span.plane.interior!r} inside; take raw bytes with page()"
            )
        return span

    def _page_shape(self, span: PlaneSpan) -> tuple[int, int, int]:
        return self.descriptor.layout.block_tokens, span.plane.head_count, span.plane.head_dim

    def _run_shape(self, span: PlaneSpan, first_block: int, block_count: int) -> tuple[int, int, int]:
        check_bounds("first_block", first_block, self.descriptor.block_count)
        beyond = self.descriptor.block_count - first_block + 1
        if not 1 <= block_count < beyond:
            raise OutOfBounds("block_count", block_count, least=1, limit=beyond)
        if block_count > 1 and span.block_stride_bytes != span.plane.page_bytes:
            raise ViewUnavailable(
                "run",
                span.plane.name,
                "its blocks do not touch in this order; slice numpy() or torch(), or use runs of one block",
            )
        tokens, heads, dims = self._page_shape(span)
        return block_count * tokens, heads, dims

    def _array(self, span: PlaneSpan, layer: int, block: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return np.ndarray(
            shape,
            dtype=_NUMPY_TYPES[span.plane.data_type],
            buffer=self._flat(),
            offset=_offset_bytes(span, layer, block),
            strides=_strides(span, shape, span.plane.data_type.itemsize),
        )

    def _tensor(self, span: PlaneSpan, layer: int, block: int, shape: tuple[int, ...]) -> "Tensor":
        item_bytes = span.plane.data_type.itemsize
        base = self._tensor_base(span.plane)
        return base.as_strided(
            shape,
            [stride // item_bytes for stride in _strides(span, shape, item_bytes)],
            _offset_bytes(span, layer, block) // item_bytes,
        )

    def _tensor_base(self, plane: Plane) -> "Tensor":
        self._flat()
        base = self._tensors.get(plane.data_type)
        if base is None:
            try:
                import torch
            except ModuleNotFoundError as missing:
                raise ViewUnavailable(
                    "torch", plane.name, "torch is not installed; install it or use numpy"
                ) from missing
            # torch keeps the object but not its buffer: only a memoryview in between stops the mapping from
            # being closed under a tensor [M8].
            guard = memoryview(self._mapping.region)
            flat = torch.frombuffer(guard, dtype=torch.uint8, count=self.descriptor.size_bytes)
            base = flat.view(getattr(torch, plane.data_type.value))
            self._tensors[plane.data_type] = base
        return base


def block_runs(table: Sequence[int] | npt.NDArray[np.integer[Any]]) -> list[Run]:
    """Cuts a block table into its runs of neighbouring ids, in table order. An empty table has none."""
    blocks = np.asarray(table, dtype=np.int64)
    if blocks.size == 0:
        return []
    starts = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) != 1)
    lengths = np.diff(starts, append=blocks.size)
    return [Run(first, count) for first, count in zip(blocks[starts].tolist(), lengths.tolist(), strict=True)]


def _offset_bytes(span: PlaneSpan, layer: int, block: int) -> int:
    return span.offset_bytes + layer * span.layer_stride_bytes + block * span.block_stride_bytes


def _strides(span: PlaneSpan, shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Byte strides of a view whose inner three axes are contiguous and whose fourth, if any, is the block."""
    heads, dims = shape[-2:]
    inner = (heads * dims * item_bytes, dims * item_bytes, item_bytes)
    return inner if len(shape) == 3 else (span.block_stride_bytes, *inner)
