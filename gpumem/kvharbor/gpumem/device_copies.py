"""Copies whole blocks of device memory, and zeroes it, on a stream of the current context."""

from collections.abc import Sequence

from kvharbor.gpumem import driver
from kvharbor.gpumem.copies import check_pairs
from kvharbor.gpumem.layout import BlockOrder, Descriptor, PlaneSpan


def copy_blocks_on_device(
    address: int, descriptor: Descriptor, pairs: Sequence[tuple[int, int]], *, stream: int
) -> None:
    """Copies each (source, destination) block of the arena at `address`, as `copy_blocks` does on a host.

    Returns when all of it is done. Everything is checked before the first byte moves [M10]; the arena is as long as
    the descriptor says, which the caller has checked. Raises OutOfBounds and CopyConflict, and DeviceFailed after
    which what the destinations hold is unknown.

    In block-major order a block is one copy; in layer-major order one a plane, in two dimensions, and where layers
    lie further apart than the device's pitch may be (2 GiB, mostly), one a page.
    """
    check_pairs(descriptor, pairs)
    if descriptor.layout.order is BlockOrder.BLOCK_MAJOR:
        block_bytes = descriptor.layout.block_bytes
        for source, destination in pairs:
            driver.memcpy_async(
                address + destination * block_bytes, address + source * block_bytes, block_bytes, stream
            )
    else:
        max_pitch_bytes = driver.device_attribute("MAX_PITCH", driver.context_device())
        for span in descriptor.spans:
            copy_pages = _copy_pages if span.layer_stride_bytes <= max_pitch_bytes else _copy_pages_singly
            for source, destination in pairs:
                copy_pages(address + span.offset_bytes, span, source, destination, stream)
    driver.stream_synchronize(stream)


def zero_on_device(address: int, size_bytes: int, *, stream: int) -> None:
    """Zeroes memory of the current context's device; returns when it is done."""
    driver.memset_async(address, 0, size_bytes, stream)
    driver.stream_synchronize(stream)


def _copy_pages(address: int, span: PlaneSpan, source: int, destination: int, stream: int) -> None:
    driver.memcpy_2d_async(
        address + destination * span.block_stride_bytes,
        address + source * span.block_stride_bytes,
        width_bytes=span.plane.page_bytes,
        height=span.plane.layer_count,
        pitch_bytes=span.layer_stride_bytes,
        stream=stream,
    )


def _copy_pages_singly(address: int, span: PlaneSpan, source: int, destination: int, stream: int) -> None:
    for layer in range(span.plane.layer_count):
        first = address + layer * span.layer_stride_bytes
        driver.memcpy_async(
            first + destination * span.block_stride_bytes,
            first + source * span.block_stride_bytes,
            span.plane.page_bytes,
            stream,
        )
