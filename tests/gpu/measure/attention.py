"""Attention of one new token a row over long histories: blocks in both orders against contiguous K and V.

The pool has all layers of a model, so that block-major spreads a layer's pages over the whole of it.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.figures import interleaved
from gpu.measure.question import Answer, Figures
from gpu.rig import Rig
from kvharbor.gpumem import BlockOrder, BlockViews, DataType, Layout, VmmArena

if TYPE_CHECKING:
    from torch import Tensor

ROWS, HISTORY, HEADS, KV_HEADS, DIM = 16, 4096, 32, 8, 128
LAYERS = 32
MEASURED_LAYERS = (0, 8, 16, 24)
"""Many times what a second-level cache holds, so that each pass comes from memory."""
TOKENS = (16, 64)
SPLITS = 8
ROUNDS = 15
MOST_DIFFERENCE = 2e-2
"""In 16 bits the orders of summing differ by some units in the last place of a number around 1."""


@dataclass(frozen=True, slots=True)
class History:
    """K and V of one layer twice: in blocks, and contiguous with the same content."""

    keys: "Tensor"
    values: "Tensor"
    plain_keys: "Tensor"
    plain_values: "Tensor"


def ask(rig: Rig) -> Answer:
    """Measures each order with 16 and 64 tokens a block, contiguous K and V beside it in the same rounds."""
    figures: Figures = {}
    for order, block_tokens in itertools.product(BlockOrder, TOKENS):
        layout = Layout.attention("decode", LAYERS, KV_HEADS, DIM, DataType.FLOAT16, block_tokens, order=order)
        figures[f"{order.value}.{block_tokens}_tokens"] = _measured(rig, layout)
    said = [
        f"{name}: kernel {seen['us']['blocks_triton']} us a layer ({seen['triton_over_contiguous']} of contiguous), "
        f"gather and SDPA {seen['us']['blocks_sdpa']} us ({seen['sdpa_over_contiguous']})"
        for name, seen in figures.items()
    ]
    return Answer(f"{ROWS} rows of {HISTORY} tokens: " + "; ".join(said), figures)


def _measured(rig: Rig, layout: Layout) -> Figures:
    import torch

    blocks_a_row = HISTORY // layout.block_tokens
    descriptor = layout.descriptor(ROWS * blocks_a_row + layout.scratch_blocks)
    with VmmArena.create(descriptor.size_bytes, rig.device) as arena, arena.map() as mapping:
        views = BlockViews(mapping, descriptor)
        with torch.device("cuda", rig.device.ordinal), torch.inference_mode():
            torch.manual_seed(1)
            ids = torch.randperm(ROWS * blocks_a_row) + layout.scratch_blocks
            table = ids.reshape(ROWS, blocks_a_row).to(torch.int32)
            query = torch.randn(ROWS, HEADS, DIM, dtype=torch.float16)
            histories = [_history(views, layer, table) for layer in MEASURED_LAYERS]
            ways = _ways(query, table)
            difference = _largest_difference(ways, histories[0])
            us = interleaved({name: _timer(way, histories) for name, way in ways.items()}, ROUNDS)
        views.close()
        del histories, views
    return _figures(us, difference)


def _history(views: BlockViews, layer: int, table: "Tensor") -> History:
    from gpu.decode import gathered

    keys, values = (views.torch(plane, layer) for plane in ("k", "v"))
    for blocks in (keys, values):
        blocks.normal_()
    return History(keys, values, gathered(keys, table), gathered(values, table))


def _ways(query: "Tensor", table: "Tensor") -> dict[str, Callable[[History], "Tensor"]]:
    import torch

    from gpu.decode import attend_contiguous, attend_gathered
    from gpu.paged_decode import Blocks, attend

    # To the kernel contiguous K and V are blocks as long as a row.
    rows = torch.arange(ROWS, dtype=torch.int32)[:, None]
    return {
        "contiguous_sdpa": lambda own: attend_contiguous(query, own.plain_keys, own.plain_values),
        "contiguous_triton": lambda own: attend(
            query, Blocks(own.plain_keys.transpose(1, 2), own.plain_values.transpose(1, 2), rows, HISTORY), SPLITS
        ),
        "blocks_sdpa": lambda own: attend_gathered(query, own.keys, own.values, table),
        "blocks_triton": lambda own: attend(query, Blocks(own.keys, own.values, table, HISTORY), SPLITS),
    }


def _largest_difference(ways: dict[str, Callable[[History], "Tensor"]], history: History) -> float:
    """Also compiles and warms up. Raises AssertionError if a way computes something else."""
    expected = ways["contiguous_sdpa"](history)
    difference = max(float((way(history) - expected).abs().max()) for way in ways.values())
    assert difference < MOST_DIFFERENCE, difference
    return difference


def _timer(way: Callable[[History], "Tensor"], histories: list[History]) -> Callable[[], float]:
    """Microseconds a layer, by the device's own clock."""

    def sample() -> float:
        with _timed() as took_ms:
            for history in histories:
                way(history)
        return took_ms[0] * 1e3 / len(histories)

    return sample


@contextmanager
def _timed() -> Iterator[list[float]]:
    import torch

    cuda: Any = torch.cuda
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    took_ms: list[float] = []
    begin.record()
    yield took_ms
    end.record()
    end.synchronize()
    took_ms.append(begin.elapsed_time(end))


def _figures(us: dict[str, float], difference: float) -> Figures:
    read_bytes = 2 * ROWS * HISTORY * KV_HEADS * DIM * 2
    return {
        "us": {name: round(value, 1) for name, value in us.items()},
        "gb_s": {name: round(read_bytes / value / 1e3, 1) for name, value in us.items()},
        "triton_over_contiguous": round(us["blocks_triton"] / us["contiguous_triton"], 3),
        "sdpa_over_contiguous": round(us["blocks_sdpa"] / us["contiguous_sdpa"], 3),
        "largest_difference": difference,
    }
