"""Views of device memory, as far as they need no driver: CuPy computes addresses and strides without one.

Host memory stands in for the device's, so that every view can be read at the address that it names.
"""

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kvharbor.gpumem import (
    ArenaClosed,
    ArenaKind,
    ArenaUnfit,
    BlockOrder,
    BlockViews,
    DataType,
    Device,
    Export,
    HostArena,
    Layout,
    Mapping,
    OutOfBounds,
    Plane,
    ViewUnavailable,
)
from kvharbor.gpumem.borrows import Borrow, Borrows

BLOCK_COUNT = 5
DEVICE = Device("GPU-11111111-2222-3333-4444-555555555555", 1, "none")
HYBRID = (
    Plane.of_tokens("k", 3, 2, 8, DataType.BFLOAT16, 16),
    Plane("tiled", 2, DataType.UINT8, 48, interior="vllm-cpu-amx"),
    Plane.of_tokens("v", 3, 2, 4, DataType.FLOAT8_E4M3, 16),
    Plane.of_tokens("k_scale", 3, 2, 2, DataType.FLOAT32, 16),
    Plane.of_tokens("latent", 1, 1, 24, DataType.FLOAT16, 16),
)


@dataclass
class HostAsDevice:
    """A host mapping at its own address, with the face of a device's."""

    mapping: Mapping
    device: Device = DEVICE
    kind: ArenaKind = ArenaKind.CUDA_VMM
    writable: bool = True
    borrows: Borrows = field(default_factory=Borrows)

    @property
    def size_bytes(self) -> int:
        return self.mapping.size_bytes

    @property
    def address(self) -> int:
        return np.frombuffer(self.mapping.buffer, np.uint8).ctypes.data

    def borrow(self) -> Borrow:
        return self.borrows.lend(self)

    def vacate(self) -> None:
        raise NotImplementedError

    def replace(self, export: Export) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Viewed:
    """The same random bytes, viewed as a device's and as the host's own."""

    memory: HostAsDevice
    views: BlockViews
    on_host: BlockViews


@pytest.fixture(params=list(BlockOrder), ids=lambda order: order.value)
def viewed(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[Viewed]:
    descriptor = Layout("m", 16, HYBRID, order=request.param).descriptor(BLOCK_COUNT)
    with HostArena.create(descriptor.size_bytes) as arena, arena.map() as mapping:
        with mapping.buffer as buffer:
            buffer[:] = np.random.default_rng(1).bytes(descriptor.size_bytes)
        memory = HostAsDevice(mapping)
        views, on_host = BlockViews(memory, descriptor), BlockViews(mapping, descriptor)
        yield Viewed(memory, views, on_host)
        views.close()
        on_host.close()


def read_at(view: Any) -> np.ndarray[Any, Any]:
    """What lies where a CuPy array says that its elements are."""
    reach_bytes = sum((length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True))
    held = (ctypes.c_char * (reach_bytes + view.itemsize)).from_address(view.data.ptr)
    return np.ndarray(view.shape, dtype=str(view.dtype), buffer=held, strides=view.strides)


def test_every_layer_of_every_plane_lies_where_the_host_views_it(viewed: Viewed) -> None:
    """M2: addresses come from the descriptor, and mean the same on a device; raw bits where CuPy has no such type."""
    for plane in ("k", "v", "k_scale", "latent"):
        for layer in range(viewed.views.descriptor.span(plane).plane.layer_count):
            array, expected = viewed.views.cupy(plane, layer), viewed.on_host.numpy(plane, layer)
            assert (array.shape, array.strides, array.dtype) == (expected.shape, expected.strides, expected.dtype)
            assert read_at(array).tobytes() == expected.tobytes()
            assert array.data.ptr - viewed.memory.address == viewed.views.descriptor.page_offset_bytes(plane, layer, 0)


def test_every_page_lies_where_the_host_has_it(viewed: Viewed) -> None:
    """Opaque interiors too: the page is the one view that they have."""
    for span in viewed.views.descriptor.spans:
        for layer in range(span.plane.layer_count):
            for block in range(BLOCK_COUNT):
                page = viewed.views.page(span.plane.name, layer, block)
                expected = viewed.on_host.page(span.plane.name, layer, block)
                assert (page.shape, str(page.dtype)) == (expected.shape, "uint8")
                assert read_at(page).tobytes() == expected.tobytes()


def test_a_run_lies_where_the_host_has_it(viewed: Viewed) -> None:
    """Several blocks in one view where they touch; elsewhere it is refused, and one block is a run."""
    longest = 3 if viewed.views.descriptor.layout.order is BlockOrder.LAYER_MAJOR else 1
    array, expected = viewed.views.cupy_run("k", 2, 1, longest), viewed.on_host.numpy_run("k", 2, 1, longest)
    assert (array.shape, array.strides) == (expected.shape, expected.strides)
    assert read_at(array).tobytes() == expected.tobytes()
    with pytest.raises(OutOfBounds):
        viewed.views.cupy_run("k", 2, 1, BLOCK_COUNT)
    if longest == 1:
        with pytest.raises(ViewUnavailable, match="do not touch"):
            viewed.views.cupy_run("k", 2, 1, 2)


def test_views_name_the_device_by_this_processs_ordinal(viewed: Viewed) -> None:
    """CuPy would ask the driver otherwise, and take whichever device is current."""
    assert viewed.views.cupy("k", 0).data.device_id == DEVICE.ordinal


def test_a_view_and_what_is_made_from_it_keep_the_mapping_open(viewed: Viewed) -> None:
    """M8: a slice outlives its array, and both outlive the set of views."""
    part = viewed.views.cupy("k", 1)[2:4, :8]
    viewed.views.close()
    assert viewed.memory.borrows.count == 1
    del part
    assert viewed.memory.borrows.count == 0


def test_numpy_and_cupy_are_each_refused_for_the_others_memory(viewed: Viewed) -> None:
    """A numpy array of a device address would be a SIGSEGV; the error says what to take."""
    for make in (viewed.views.numpy, lambda plane, layer: viewed.views.numpy_run(plane, layer, 0, 1)):
        with pytest.raises(ViewUnavailable, match=f"is on device {DEVICE.uuid}; use cupy or torch"):
            make("k", 0)
    for make in (viewed.on_host.cupy, lambda plane, layer: viewed.on_host.cupy_run(plane, layer, 0, 1)):
        with pytest.raises(ViewUnavailable, match="the host's; use numpy or torch"):
            make("k", 0)


def test_an_opaque_plane_has_no_typed_view(viewed: Viewed) -> None:
    """What an engine keeps inside a page is its own affair."""
    for make in (viewed.views.cupy, viewed.views.torch):
        with pytest.raises(ViewUnavailable, match="take raw bytes with page"):
            make("tiled", 0)


def test_closed_views_make_no_more_views(viewed: Viewed) -> None:
    """A late caller gets a typed error."""
    viewed.views.close()
    for call in (lambda: viewed.views.cupy("k", 0), lambda: viewed.views.torch("k", 0)):
        with pytest.raises(ArenaClosed, match="set of views is closed"):
            call()


def test_a_mapping_shorter_than_the_descriptor_is_refused(viewed: Viewed) -> None:
    """Nothing is borrowed for it."""
    with pytest.raises(ArenaUnfit, match="the mapping has"):
        BlockViews(viewed.memory, viewed.views.descriptor.layout.descriptor(BLOCK_COUNT + 1))
    assert viewed.memory.borrows.count == 1


def test_without_cupy_the_error_names_the_extra(viewed: Viewed, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy is imported by the first view of device memory and not before."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ViewUnavailable, match=r"pip install 'kvharbor\[cuda\]'"):
        viewed.views.cupy("k", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has CUDA here")
def test_a_torch_without_cuda_says_so(viewed: Viewed) -> None:
    """Nothing is copied to the host in its place."""
    with pytest.raises(ViewUnavailable, match="sees no CUDA device; install a build for CUDA"):
        viewed.views.torch("k", 0)
