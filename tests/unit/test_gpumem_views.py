"""Views, runs and copies of blocks over a real arena."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract.leaks import no_leaks
from kvharbor.gpumem import (
    ArenaClosed,
    ArenaUnfit,
    BlockOrder,
    BlockViews,
    CopyConflict,
    DataType,
    Descriptor,
    HostArena,
    Layout,
    Mapping,
    OutOfBounds,
    Plane,
    Run,
    ViewUnavailable,
    block_runs,
    copy_blocks,
)

__all__ = ["no_leaks"]
pytestmark = pytest.mark.usefixtures("no_leaks")

BLOCK_COUNT = 6
HYBRID = (
    Plane.of_tokens("k", 2, 2, 8, DataType.FLOAT16, 16),
    Plane("tiled", 3, DataType.UINT8, 48, interior="vllm-cpu-amx"),
    Plane.of_tokens("v", 2, 2, 4, DataType.FLOAT16, 16),
)


@contextmanager
def viewed(layout: Layout) -> Iterator[tuple[Mapping, BlockViews]]:
    """A mapped arena of BLOCK_COUNT blocks and its views."""
    descriptor = layout.descriptor(BLOCK_COUNT)
    with HostArena.create(descriptor.size_bytes) as arena, arena.map() as mapping:
        views = BlockViews(mapping, descriptor)
        try:
            yield mapping, views
        finally:
            views.close()


def attention(data_type: DataType = DataType.FLOAT32, order: BlockOrder = BlockOrder.LAYER_MAJOR) -> Layout:
    return Layout.attention("m", 3, 2, 8, data_type, 16, order=order)


@pytest.mark.parametrize(
    ("data_type", "numpy_type", "torch_type"),
    [
        (DataType.FLOAT32, np.float32, torch.float32),
        (DataType.FLOAT16, np.float16, torch.float16),
        (DataType.BFLOAT16, np.uint16, torch.bfloat16),
        (DataType.FLOAT8_E4M3, np.uint8, torch.float8_e4m3fn),
        (DataType.FLOAT8_E5M2, np.uint8, torch.float8_e5m2),
        (DataType.UINT8, np.uint8, torch.uint8),
    ],
)
@pytest.mark.parametrize("order", list(BlockOrder))
def test_every_data_type_is_viewed_in_place(
    order: BlockOrder, data_type: DataType, numpy_type: type, torch_type: torch.dtype
) -> None:
    """torch sees the plane's own type; numpy the same bits, raw where it has no such type."""
    with viewed(attention(data_type, order)) as (_, views):
        tensor = views.torch("v", 2)
        tensor[4, 7, 1] = torch.full((8,), 1.5).to(torch_type)
        array = views.numpy("v", 2)
        expected = torch.full((8,), 1.5).to(torch_type).view(torch.uint8).numpy().tobytes()
        assert (array.dtype, tensor.dtype) == (np.dtype(numpy_type), torch_type)
        assert array.shape == tuple(tensor.shape) == (BLOCK_COUNT, 16, 2, 8)
        assert array[4, 7, 1].tobytes() == expected
        assert views.numpy_run("v", 2, 4, 1)[7, 1].tobytes() == expected
        assert views.page("v", 2, 4).tobytes().count(expected) == 1
        del array, tensor


def test_a_run_is_one_contiguous_view_of_neighbouring_blocks() -> None:
    """[token, head, dim] over several blocks, for attention that reads history where it lies."""
    with viewed(attention()) as (_, views):
        views.numpy("k", 1)[:] = np.arange(BLOCK_COUNT * 16 * 2 * 8).reshape(BLOCK_COUNT, 16, 2, 8)
        run, tensor = views.numpy_run("k", 1, 2, 3), views.torch_run("k", 1, 2, 3)
        assert run.shape == tuple(tensor.shape) == (48, 2, 8)
        assert run.flags.c_contiguous
        assert tensor.is_contiguous()
        assert run.ravel().tolist() == list(range(2 * 256, 5 * 256))
        assert tensor.flatten().tolist() == run.ravel().tolist()
        del run, tensor


def test_block_major_has_runs_of_one_block_only() -> None:
    """Neighbours do not touch there; the error names the strided view to take instead."""
    with viewed(attention(order=BlockOrder.BLOCK_MAJOR)) as (_, views):
        assert views.numpy_run("k", 0, 3, 1).shape == (16, 2, 8)
        with pytest.raises(ViewUnavailable, match=r"slice numpy\(\) or torch\(\)"):
            views.torch_run("k", 0, 3, 2)


@pytest.mark.parametrize(
    ("first_block", "block_count"),
    [(-1, 1), (BLOCK_COUNT, 1), (0, 0), (0, -1), (0, BLOCK_COUNT + 1), (4, 3), (0, 2**40)],
)
def test_a_run_beyond_the_arena_is_refused(first_block: int, block_count: int) -> None:
    """A view must not reach into another plane, let alone out of the mapping."""
    with viewed(attention()) as (_, views), pytest.raises(OutOfBounds):
        views.numpy_run("k", 0, first_block, block_count)


def test_an_opaque_plane_has_raw_pages_only() -> None:
    """What an engine keeps inside a page is its own affair."""
    with viewed(Layout("m", 16, HYBRID)) as (_, views):
        views.page("tiled", 2, 5)[:] = 7
        assert set(views.page("tiled", 2, 5).tolist()) == {7}
        assert views.page("tiled", 2, 4).any() == np.False_
        for make in (views.numpy, views.torch):
            with pytest.raises(ViewUnavailable, match="'vllm-cpu-amx' inside; take raw bytes"):
                make("tiled", 0)


def test_views_need_a_mapping_of_the_whole_descriptor() -> None:
    """A mapping too short is refused before any address is made from the descriptor."""
    layout = attention()
    descriptor = layout.descriptor(BLOCK_COUNT)
    with (
        HostArena.create(descriptor.size_bytes - 1) as arena,
        arena.map() as mapping,
        pytest.raises(ArenaUnfit, match=f"the mapping has {descriptor.size_bytes - 1}"),
    ):
        BlockViews(mapping, descriptor)


def test_all_bytes_are_one_tensor() -> None:
    """For engines with a cut of their own: every block of every plane, opaque ones too, at its descriptor's offset."""
    with viewed(Layout("m", 16, HYBRID)) as (_, views):
        flat = views.torch_bytes()
        assert (flat.dtype, flat.numel()) == (torch.uint8, views.descriptor.size_bytes)
        views.page("tiled", 2, 5)[:] = 7
        first = views.descriptor.page_offset_bytes("tiled", 2, 5)
        assert flat.nonzero().flatten().tolist() == list(range(first, first + 48))
        del flat


def test_closed_views_make_no_more_views() -> None:
    """Closing lets the mapping go; a late caller gets a typed error."""
    with viewed(attention()) as (_, views):
        views.close()
        calls = (lambda: views.numpy("k", 0), lambda: views.torch("k", 0), lambda: views.page("k", 0, 0))
        for call in (*calls, views.torch_bytes):
            with pytest.raises(ArenaClosed, match="set of views is closed"):
                call()


def test_numpy_views_work_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is optional: only its own views ask for it."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with viewed(attention()) as (_, views):
        assert views.numpy("k", 0).shape == (BLOCK_COUNT, 16, 2, 8)
        with pytest.raises(ViewUnavailable, match="torch is not installed"):
            views.torch("k", 0)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([], []),
        ([5], [Run(5, 1)]),
        ([5, 6, 7], [Run(5, 3)]),
        ([5, 6, 9, 8, 9, 10], [Run(5, 2), Run(9, 1), Run(8, 3)]),
        ([3, 3], [Run(3, 1), Run(3, 1)]),
        ([0, 2**31 - 2, 2**31 - 1], [Run(0, 1), Run(2**31 - 2, 2)]),
    ],
)
def test_a_table_is_cut_where_neighbours_end(table: list[int], expected: list[Run]) -> None:
    """Runs keep the order of the table, which is the order of the tokens."""
    assert block_runs(table) == expected
    assert block_runs(np.array(table, dtype=np.int32)) == expected


@given(st.lists(st.integers(0, 12)))
def test_runs_spell_the_table(table: list[int]) -> None:
    """Nothing is lost or reordered, and no two runs could be one."""
    runs = block_runs(table)
    assert [run.first_block + i for run in runs for i in range(run.block_count)] == table
    assert all(a.first_block + a.block_count != b.first_block for a, b in itertools.pairwise(runs))


def fill(views: BlockViews, content: np.ndarray) -> None:
    for page, seed in zip(every_page(views.descriptor), content, strict=True):
        views.page(*page)[:] = seed


def every_page(descriptor: Descriptor) -> list[tuple[str, int, int]]:
    return [
        (span.plane.name, layer, block)
        for span in descriptor.spans
        for layer in range(span.plane.layer_count)
        for block in range(descriptor.block_count)
    ]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(3, BLOCK_COUNT - 1)), unique_by=lambda pair: pair[1]),
    st.sampled_from(BlockOrder),
)
def test_a_copy_moves_whole_blocks_and_nothing_else(pairs: list[tuple[int, int]], order: BlockOrder) -> None:
    """Every plane and layer of every pair, opaque planes too, equally in both orders."""
    with viewed(Layout("m", 16, HYBRID, order=order)) as (mapping, views):
        fill(views, np.arange(len(every_page(views.descriptor)), dtype=np.uint8))
        expected = {page: views.page(*page).tobytes() for page in every_page(views.descriptor)}
        sources = {destination: source for source, destination in pairs}
        for plane, layer, block in list(expected):
            expected[plane, layer, block] = expected[plane, layer, sources.get(block, block)]
        copy_blocks(mapping, views.descriptor, pairs)
        assert {page: views.page(*page).tobytes() for page in every_page(views.descriptor)} == expected


@pytest.mark.parametrize("pairs", [[(2, 2)], [(0, 3), (1, 3)], [(0, 1), (1, 2)], [(1, 2), (0, 1)]])
@pytest.mark.parametrize("order", list(BlockOrder))
def test_a_copy_whose_result_depends_on_order_is_refused_before_a_byte_moves(
    order: BlockOrder, pairs: list[tuple[int, int]]
) -> None:
    """Same block, a destination named twice, or a chain."""
    with viewed(attention(order=order)) as (mapping, views):
        fill(views, np.arange(len(every_page(views.descriptor)), dtype=np.uint8))
        before = bytes(mapping.buffer)
        with pytest.raises(CopyConflict, match="split chained copies"):
            copy_blocks(mapping, views.descriptor, pairs)
        assert bytes(mapping.buffer) == before


@pytest.mark.parametrize("pairs", [[(0, BLOCK_COUNT)], [(-1, 2)], [(0, 1), (BLOCK_COUNT, 2)]])
def test_a_copy_beyond_the_arena_is_refused_before_a_byte_moves(pairs: list[tuple[int, int]]) -> None:
    """Block ids of a copy may come from the wire."""
    with viewed(attention()) as (mapping, views):
        views.page("k", 0, 0)[:] = 1
        with pytest.raises(OutOfBounds, match=r"(source|destination) block"):
            copy_blocks(mapping, views.descriptor, pairs)
        assert set(views.page("k", 0, 1).tolist()) == {0}
