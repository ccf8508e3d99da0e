"""Copies whole blocks inside an arena, page by page, whatever their inside."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvharbor.gpumem.bounds import check_block
from kvharbor.gpumem.errors import ArenaUnfit, CopyConflict
from kvharbor.gpumem.layout import BlockOrder, Descriptor, PlaneSpan
from kvharbor.gpumem.mapping import Mapping


def copy_blocks(mapping: Mapping, descriptor: Descriptor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies each (source, destination) block: every plane and layer, O(bytes copied).

    A source may serve several destinations. Everything is checked before the first byte moves [M10]: raises
    OutOfBounds, and CopyConflict when a destination is named twice or is a source too (the result would
    depend on the order). The caller keeps source and destination from being written or freed meanwhile.
    """
    if mapping.size_bytes < descriptor.size_bytes:
        raise ArenaUnfit(f"the mapping has {mapping.size_bytes}", size_bytes=descriptor.size_bytes)
    check_pairs(descriptor, pairs)
    flat = np.frombuffer(mapping.buffer, dtype=np.uint8, count=descriptor.size_bytes)
    if descriptor.layout.order is BlockOrder.BLOCK_MAJOR:
        blocks = flat.reshape(descriptor.block_count, descriptor.layout.block_bytes)
        for source, destination in pairs:
            blocks[destination] = blocks[source]
        return
    for span in descriptor.spans:
        pages = _pages(flat, descriptor, span)
        for source, destination in pairs:
            # The identity ufunc, since a plain assignment takes the interleaved layers for overlapping and
            # goes through a temporary, several times slower.
            np.positive(pages[:, source], out=pages[:, destination])


def check_pairs(descriptor: Descriptor, pairs: Sequence[tuple[int, int]]) -> None:
    """Raises OutOfBounds or CopyConflict for pairs that cannot be copied in one go, whatever their order [M10]."""
    sources = {source for source, _ in pairs}
    written: set[int] = set()
    for source, destination in pairs:
        check_block("source block", source, descriptor.block_count)
        check_block("destination block", destination, descriptor.block_count)
        if destination in sources or destination in written:
            raise CopyConflict(destination)
        written.add(destination)


def _pages(flat: npt.NDArray[np.uint8], descriptor: Descriptor, span: PlaneSpan) -> npt.NDArray[np.uint64]:
    """All pages of a plane in words of 8 bytes, `[layer, block, word]`; pages are multiples of 16 bytes."""
    return np.ndarray(
        (span.plane.layer_count, descriptor.block_count, span.plane.page_bytes // 8),
        dtype=np.uint64,
        buffer=flat,
        offset=span.offset_bytes,
        strides=(span.layer_stride_bytes, span.block_stride_bytes, 8),
    )
