"""Copies of whole blocks, as the service makes them, against the largest copy that the card can make."""

import itertools
from collections.abc import Callable

from bench.figures import interleaved, seconds
from gpu.measure.question import Answer, Figures
from gpu.rig import Rig
from kvharbor.gpumem import BlockOrder, DataType, Descriptor, Layout, VmmArena, copy_blocks_on_device, driver
from kvharbor.gpumem.devices import current

ROUNDS = 20
BLOCKS = 256
TOKENS = (16, 64)
COPIED = (1, 16, 64)
"""Blocks a call: one is a fork's tail."""


def ask(rig: Rig) -> Answer:
    """Copies blocks of a model of 32 layers with 8 heads of 128 in 16 bits, both orders, 16 and 64 tokens a block."""
    figures: Figures = {"ceiling_gb_s": _ceiling_gb_s(rig)}
    for order, block_tokens in itertools.product(BlockOrder, TOKENS):
        layout = Layout.attention("copies", rig.sized(32, 2), 8, 128, DataType.FLOAT16, block_tokens, order=order)
        figures[f"{order.value}.{block_tokens}_tokens"] = _copied(rig, layout.descriptor(BLOCKS))
    ceiling = figures["ceiling_gb_s"]
    said = [
        f"{name}: {seen['gb_s'][str(COPIED[-1])]} GB/s ({seen['gb_s'][str(COPIED[-1])] / ceiling:.0%}), "
        f"one block {seen['us']['1']} us"
        for name, seen in figures.items()
        if isinstance(seen, dict)
    ]
    return Answer(f"of {ceiling} GB/s, with {COPIED[-1]} blocks a call: " + "; ".join(said), figures)


def _ceiling_gb_s(rig: Rig) -> float:
    """Bytes copied, not those read and written, a second."""
    size_bytes = rig.sized(1 << 30, 1 << 22)
    with VmmArena.create(2 * size_bytes, rig.device) as arena, arena.map() as mapping, current(rig.device):

        def copy() -> None:
            driver.memcpy_async(mapping.address, mapping.address + size_bytes, size_bytes, 0)
            driver.stream_synchronize(0)

        taken = interleaved({"copy": lambda: seconds(copy)}, ROUNDS)
    return _gb_s(size_bytes, taken["copy"])


def _copied(rig: Rig, descriptor: Descriptor) -> Figures:
    with VmmArena.create(descriptor.size_bytes, rig.device) as arena, arena.map() as mapping, current(rig.device):
        stream = driver.stream_create()

        def copier(count: int) -> Callable[[], float]:
            # Far apart and back to front: nothing that a longer copy could do at once.
            pairs = [(2 * number, BLOCKS - 1 - 2 * number) for number in range(count)]
            return lambda: seconds(lambda: copy_blocks_on_device(mapping.address, descriptor, pairs, stream=stream))

        taken = interleaved({str(count): copier(count) for count in COPIED}, ROUNDS)
        driver.stream_destroy(stream)
    block_bytes = descriptor.layout.block_bytes
    return {
        "block_bytes": block_bytes,
        "us": {count: round(seconds_each * 1e6, 1) for count, seconds_each in taken.items()},
        "gb_s": {count: _gb_s(int(count) * block_bytes, seconds_each) for count, seconds_each in taken.items()},
    }


def _gb_s(size_bytes: int, taken_s: float) -> float:
    return round(size_bytes / taken_s / 1e9, 1)
