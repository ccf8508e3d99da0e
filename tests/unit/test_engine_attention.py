"""Attention over blocks where they lie, against the definition in double precision."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvharbor.engines.transformers.packed import ViewLayer, packed_step
from kvharbor.engines.transformers.padded import GatherLayer, padded_step
from kvharbor.engines.transformers.pieces import PoolWindow
from kvharbor.engines.transformers.step import Row
from kvharbor.gpumem import BlockOrder, BlockViews, DataType, HostArena, Layout, Plane

BLOCK_TOKENS = 16
LAYERS = 2
SCALE = 0.21


@dataclass(frozen=True)
class Shape:
    """Heads of K and V, queries for each, and the widths of K and V."""

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Tokens:
    """Q, K and V of the tokens of one row, from position 0: `[head, token, dim]`."""

    query: Tensor
    key: Tensor
    value: Tensor


def memory(shape: Shape, order: BlockOrder, block_count: int, kind: DataType = DataType.FLOAT32) -> BlockViews:
    """A pool's memory for these heads; it lives as long as its views."""
    planes = (
        Plane.of_tokens("k", LAYERS, shape.kv_heads, shape.key_dim, kind, BLOCK_TOKENS),
        Plane.of_tokens("v", LAYERS, shape.kv_heads, shape.value_dim, kind, BLOCK_TOKENS),
    )
    descriptor = Layout("test", BLOCK_TOKENS, planes, order).descriptor(block_count)
    arena = HostArena.create(descriptor.size_bytes)
    arena.reserve()
    mapping = arena.map()
    arena.close()
    return BlockViews(mapping, descriptor)


def random_tokens(shape: Shape, count: int, seed: int, kind: torch.dtype = torch.float32) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        (shape.kv_heads * shape.group, count, shape.key_dim),
        (shape.kv_heads, count, shape.key_dim),
        (shape.kv_heads, count, shape.value_dim),
    )
    return Tokens(*(torch.randn(size, generator=generator).to(kind) for size in sizes))


def write(views: BlockViews, layer: int, table: np.ndarray[Any, Any], tokens: Tokens, count: int) -> None:
    """Puts K and V of the first `count` tokens where the table says, one at a time."""
    for plane, states in (("k", tokens.key), ("v", tokens.value)):
        for position in range(count):
            block, offset = table[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            views.torch(plane, layer)[block, offset] = states[:, position]


def by_definition(tokens: Tokens, start: int) -> Tensor:
    """Causal attention of the tokens from `start` on, in double precision: `[head, token, dim]`."""
    group = tokens.query.shape[0] // tokens.key.shape[0]
    key = tokens.key.double().repeat_interleave(group, 0)
    value = tokens.value.double().repeat_interleave(group, 0)
    scores = tokens.query[:, start:].double() @ key.transpose(1, 2) * SCALE
    count = key.shape[1]
    later = torch.arange(count)[None, :] > torch.arange(start, count)[:, None]
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ value


def attend(window: PoolWindow, rows: list[Row], tokens: list[Tokens], layer: int) -> Tensor:
    """What a model's layer does with the rows' new tokens: update, then attend. `[head, token, dim]`."""
    view = ViewLayer(window, layer)
    view.step = packed_step(window, rows)
    query, key, value = (
        torch.cat([getattr(item, name)[:, row.start : row.end] for item, row in zip(tokens, rows, strict=True)], 1)
        for name in ("query", "key", "value")
    )
    new_key, new_value = view.update(key[None], value[None])
    return view.attend(query[None], new_key, new_value, SCALE)[0]


@st.composite
def tables(draw: st.DrawFn, block_counts: list[int], free: int) -> list[np.ndarray[Any, Any]]:
    """Disjoint block tables: neighbouring ids, all scattered, or cut into a few runs."""
    total = sum(block_counts)
    ids = list(range(1, free))
    cut = draw(st.integers(0, 3))
    if cut == 3:
        random.Random(draw(st.integers(0, 99))).shuffle(ids)
    else:
        for _ in range(cut):
            at = draw(st.integers(0, len(ids)))
            ids = ids[at:] + ids[:at]
    chosen = iter(ids[:total])
    return [np.array([next(chosen) for _ in range(count)], dtype=np.int32) for count in block_counts]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Shape, BlockOrder, list[tuple[int, int]], list[np.ndarray[Any, Any]]]:
    """Heads, order, and 1 to 3 rows of (history, new tokens) with their tables."""
    key_dim = draw(st.sampled_from([8, 16, 24]))
    shape = Shape(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        key_dim,
        draw(st.sampled_from([key_dim, key_dim, 8, 32])),
    )
    row = st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 40)))
    lengths = draw(st.lists(row, min_size=1, max_size=3))
    counts = [-(-(start + new) // BLOCK_TOKENS) for start, new in lengths]
    return shape, draw(st.sampled_from(BlockOrder)), lengths, draw(tables(counts, sum(counts) + 3))


@given(problem=problems(), seed=st.integers(0, 2**16))
@settings(max_examples=60)
@pytest.mark.slow
def test_attention_over_scattered_blocks_is_attention(problem: Any, seed: int) -> None:
    """Any heads, any rows, any tables, both orders: what is read in runs and merged is plain attention."""
    shape, order, lengths, block_tables = problem
    views = memory(shape, order, sum(len(table) for table in block_tables) + 3)
    window = PoolWindow(views)
    tokens = [random_tokens(shape, start + new, seed + i) for i, (start, new) in enumerate(lengths)]
    rows = [Row(table, start, range(new)) for table, (start, new) in zip(block_tables, lengths, strict=True)]
    for layer in range(LAYERS):
        for row, item in zip(rows, tokens, strict=True):
            write(views, layer, row.table, item, row.start)
        output = attend(window, rows, tokens, layer)
        expected = torch.cat([by_definition(item, row.start) for item, row in zip(tokens, rows, strict=True)], 1)
        torch.testing.assert_close(output, expected.float(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("order", BlockOrder)
def test_new_tokens_land_at_their_places_and_nowhere_else(order: BlockOrder) -> None:
    """Each row's K and V are in its own table's blocks at its positions; every other byte is untouched."""
    shape = Shape(2, 2, 8, 8)
    views = memory(shape, order, 8)
    window = PoolWindow(views)
    rows = [Row(np.array([5, 2], dtype=np.int32), 14, [1, 2, 3]), Row(np.array([7], dtype=np.int32), 3, [9])]
    tokens = [random_tokens(shape, row.end, 40 + row.end) for row in rows]
    attend(window, rows, tokens, 1)
    expected = torch.zeros_like(views.torch("v", 1))
    expected[5, 14:] = tokens[0].value[:, 14:16].transpose(0, 1)
    expected[2, 0] = tokens[0].value[:, 16]
    expected[7, 3] = tokens[1].value[:, 3]
    assert torch.equal(expected, views.torch("v", 1))
    assert not views.torch("v", 0).any()
    assert not views.torch("k", 0).any()


def test_a_row_computes_the_same_bits_alone_and_in_company() -> None:
    """[E2] rows of other lengths beside it change nothing: no padding, and so nothing to leak."""
    shape = Shape(2, 2, 16, 16)
    views = memory(shape, BlockOrder.LAYER_MAJOR, 40)
    window = PoolWindow(views)
    rows = [
        Row(np.arange(1, 9, dtype=np.int32), 100, range(7)),
        Row(np.arange(20, 22, dtype=np.int32), 0, range(29)),
        Row(np.arange(30, 36, dtype=np.int32), 90, range(1)),
    ]
    tokens = [random_tokens(shape, row.end, row.end) for row in rows]
    for row, item in zip(rows, tokens, strict=True):
        write(views, 0, row.table, item, row.start)
    together = attend(window, rows, tokens, 0)
    alone = [attend(window, [row], [item], 0) for row, item in zip(rows, tokens, strict=True)]
    assert torch.equal(torch.cat(alone, 1), together)


@pytest.mark.parametrize("kind", [DataType.BFLOAT16, DataType.FLOAT16])
def test_half_precision_merges_within_its_own_rounding(kind: DataType) -> None:
    """Partial results of 16-bit models are merged in float32: eight runs err no more than one."""
    shape = Shape(2, 2, 16, 16)
    views = memory(shape, BlockOrder.LAYER_MAJOR, 40, kind)
    table = np.array([30, 3, 17, 9, 25, 1, 12, 6, 21], dtype=np.int32)
    row = Row(table, 130, range(9))
    torch_kind = getattr(torch, kind.value)
    tokens = random_tokens(shape, row.end, 3, torch_kind)
    write(views, 0, table, tokens, row.start)
    output = attend(PoolWindow(views), [row], [tokens], 0)
    assert torch_kind == output.dtype
    rounding = 2 * torch.finfo(torch_kind).eps
    torch.testing.assert_close(output.double(), by_definition(tokens, row.start), rtol=rounding, atol=rounding)


def test_a_long_history_in_block_major_is_folded_on_the_way() -> None:
    """More runs than are kept at once: the partial results folded between give the same attention."""
    shape = Shape(1, 2, 8, 8)
    block_count = 100
    views = memory(shape, BlockOrder.BLOCK_MAJOR, block_count + 1)
    table = np.array(random.Random(5).sample(range(1, block_count + 1), block_count), dtype=np.int32)
    row = Row(table, block_count * BLOCK_TOKENS - 3, range(3))
    tokens = random_tokens(shape, row.end, 8)
    write(views, 0, table, tokens, row.start)
    output = attend(PoolWindow(views), [row], [tokens], 0)
    torch.testing.assert_close(output, by_definition(tokens, row.start).float(), rtol=1e-5, atol=2e-6)


def test_a_contiguous_history_is_one_view_of_the_mapped_memory() -> None:
    """[E1] neighbouring blocks become one piece, and a piece is memory of the pool, not a copy of it."""
    views = memory(Shape(2, 1, 8, 8), BlockOrder.LAYER_MAJOR, 12)
    (piece,) = PoolWindow(views).pieces(np.arange(3, 11, dtype=np.int32), 120)
    assert [tuple(key.shape) for key in piece.keys] == [(1, 2, 120, 8)] * LAYERS
    views.torch("k", 1)[4, 2, 1, 7] = 5.5
    assert piece.keys[1][0, 1, BLOCK_TOKENS + 2, 7].item() == 5.5


def test_gathering_lays_rows_out_as_a_left_padded_cache_would() -> None:
    """Rows end in the last column; the columns before a row's first token are zeros."""
    shape = Shape(2, 2, 8, 8)
    views = memory(shape, BlockOrder.LAYER_MAJOR, 8)
    window = PoolWindow(views)
    rows = [Row(np.array([5, 2], dtype=np.int32), 15, [1, 2]), Row(np.array([7], dtype=np.int32), 3, [9])]
    tokens = [random_tokens(shape, row.end, 60 + row.end) for row in rows]
    layer = GatherLayer(window, 0)
    layer.step = padded_step(window, rows)
    new = torch.zeros(2, 2, 2, 8)
    for index, (row, item) in enumerate(zip(rows, tokens, strict=True)):
        write(views, 0, row.table, item, row.start)
        new[index, :, -len(row.token_ids) :] = item.key[:, row.start :]
    keys, _ = layer.update(new, new)
    expected = torch.zeros(2, 2, 17, 8)
    expected[0] = tokens[0].key
    expected[1, :, -4:] = tokens[1].key
    assert torch.equal(expected, keys)
    assert layer.step.attention_mask.sum(1).tolist() == [17, 4]
    assert layer.step.position_ids[:, -1].tolist() == [16, 3]
