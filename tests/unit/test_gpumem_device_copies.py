"""Copies of blocks on a device, against those on the host, on the stub of the driver."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvharbor.gpumem import (
    BlockOrder,
    CopyConflict,
    DataType,
    Descriptor,
    DeviceFailed,
    HostArena,
    Layout,
    OutOfBounds,
    Plane,
    VmmArena,
    VmmMapping,
    copy_blocks,
    copy_blocks_on_device,
    device_of,
    driver,
    zero_on_device,
)
from kvharbor.gpumem.devices import current

LONGEST_BYTES = 16 * 64 * 3 * 5 * 8
BLOCKS = range(8)


@pytest.fixture(scope="module")
def mapping(stub_devices: tuple[str, str]) -> Iterator[VmmMapping]:
    """Room for any of the arenas below, one after the other; its device's context is this thread's."""
    device = device_of(stub_devices[0])
    with VmmArena.create(LONGEST_BYTES, device) as arena, arena.map() as mapped, current(device):
        yield mapped


@st.composite
def descriptors(draw: st.DrawFn) -> Descriptor:
    """Up to five planes of one to three layers, so that groups of planes both form and repeat."""
    planes = tuple(
        Plane(f"p{i}", draw(st.integers(1, 3)), DataType.UINT8, 16 * draw(st.integers(1, 4)), interior="opaque")
        for i in range(draw(st.integers(1, 5)))
    )
    return Layout("m", 16, planes, order=draw(st.sampled_from(BlockOrder))).descriptor(len(BLOCKS))


@st.composite
def pair_lists(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Any pairs that may be copied in one go."""
    blocks = draw(st.permutations(BLOCKS))
    source_count = draw(st.integers(1, len(BLOCKS) - 1))
    destinations = draw(st.sets(st.sampled_from(blocks[source_count:])))
    return [(draw(st.sampled_from(blocks[:source_count])), destination) for destination in sorted(destinations)]


@pytest.mark.parametrize("max_pitch_bytes", [2**31 - 1, 1], ids=["in two dimensions", "page by page"])
@given(descriptor=descriptors(), pairs=pair_lists(), seed=st.integers(0, 2**32))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_copy_on_a_device_does_what_one_on_the_host_does(
    max_pitch_bytes: int,
    mapping: VmmMapping,
    monkeypatch: pytest.MonkeyPatch,
    descriptor: Descriptor,
    pairs: list[tuple[int, int]],
    seed: int,
) -> None:
    """Every byte, in both orders, however far apart the layers may lie for a copy in two dimensions."""
    monkeypatch.setenv("KVSTUB_MAX_PITCH", str(max_pitch_bytes))
    content = np.random.default_rng(seed).integers(0, 256, descriptor.size_bytes, dtype=np.uint8).tobytes()
    driver.write_bytes(mapping.address, content)
    copy_blocks_on_device(mapping.address, descriptor, pairs, stream=0)
    with HostArena.create(descriptor.size_bytes) as arena, arena.map() as on_host:
        on_host.buffer[:] = content
        copy_blocks(on_host, descriptor, pairs)
        assert driver.read_bytes(mapping.address, descriptor.size_bytes) == bytes(on_host.buffer)


@pytest.mark.parametrize(
    ("order", "calls"),
    [(BlockOrder.BLOCK_MAJOR, {"cuMemcpyDtoDAsync": 2}), (BlockOrder.LAYER_MAJOR, {"cuMemcpy2DAsync": 4})],
)
def test_a_block_is_one_copy_or_one_a_plane(
    order: BlockOrder, calls: dict[str, int], mapping: VmmMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls cost more than bytes: neither layers nor pages are copied one by one."""
    descriptor = Layout.attention("m", 3, 1, 8, DataType.FLOAT16, 16, order=order).descriptor(len(BLOCKS))
    for function, count in calls.items():
        monkeypatch.setenv("KVSTUB_FAIL", f"{function}:{count}")
        with pytest.raises(DeviceFailed, match=function):
            copy_blocks_on_device(mapping.address, descriptor, [(1, 4), (1, 5)], stream=0)
        monkeypatch.setenv("KVSTUB_FAIL", f"{function}:{count + 1}")
        copy_blocks_on_device(mapping.address, descriptor, [(1, 4), (1, 5)], stream=0)


@pytest.mark.parametrize("order", list(BlockOrder))
@pytest.mark.parametrize(
    ("pairs", "refusal"),
    [
        ([(2, 3), (0, 0)], CopyConflict),
        ([(0, 1), (1, 2)], CopyConflict),
        ([(0, 7), (1, 7)], CopyConflict),
        ([(0, 1), (0, 8)], OutOfBounds),
        ([(0, 1), (-1, 2)], OutOfBounds),
    ],
)
def test_a_copy_is_refused_before_a_byte_moves(
    order: BlockOrder, pairs: list[tuple[int, int]], refusal: type[Exception], mapping: VmmMapping
) -> None:
    """[M10]: with one wrong pair none is copied."""
    descriptor = Layout.attention("m", 2, 1, 8, DataType.FLOAT16, 16, order=order).descriptor(len(BLOCKS))
    content = bytes(range(256)) * (descriptor.size_bytes // 256)
    driver.write_bytes(mapping.address, content)
    with pytest.raises(refusal):
        copy_blocks_on_device(mapping.address, descriptor, pairs, stream=0)
    assert driver.read_bytes(mapping.address, len(content)) == content


def test_a_copy_waits_for_its_stream(mapping: VmmMapping, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is published when it returns, so that what goes wrong on the stream has to be raised by then."""
    descriptor = Layout.attention("m", 1, 1, 8, DataType.FLOAT16, 16).descriptor(len(BLOCKS))
    stream = driver.stream_create()
    monkeypatch.setenv("KVSTUB_FAIL", "cuStreamSynchronize:1:700")
    with pytest.raises(DeviceFailed, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        copy_blocks_on_device(mapping.address, descriptor, [(0, 1)], stream=stream)
    with pytest.raises(DeviceFailed, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        zero_on_device(mapping.address, 1, stream=stream)
    driver.stream_destroy(stream)


def test_zeroing_leaves_what_lies_around(mapping: VmmMapping) -> None:
    """As many bytes as were asked for."""
    driver.write_bytes(mapping.address, b"\xff" * 64)
    zero_on_device(mapping.address + 16, 32, stream=0)
    assert driver.read_bytes(mapping.address, 64) == b"\xff" * 16 + bytes(32) + b"\xff" * 16
