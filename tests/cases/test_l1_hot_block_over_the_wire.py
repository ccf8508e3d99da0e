"""L1 (d), over the service: cycles of one hot block leave nothing behind, neither memory nor descriptors."""

from pathlib import Path

import pytest

from conftest import StartService
from kvharbor.client import connect
from kvharbor.gpumem import DataType, Layout
from raw_caller import open_descriptor_count

pytestmark = pytest.mark.slow

LAYOUT = Layout.attention("l1", layers=1, kv_heads=1, head_dim=2, data_type=DataType.FLOAT16, block_tokens=16)
WARM_UP_CYCLES = 300
CYCLES = 1_500
GROWTH_KIB = 5 * 1024


def private_kib(pid: int) -> int:
    """Returns what a process holds beside mapped files: the arena is none of its own memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_a_hot_block_leaves_nothing_behind(start_fresh: StartService) -> None:
    """Resident memory grows by less than 5 MB and the number of descriptors not at all."""
    service = start_fresh()
    pid = service.child_pid
    with connect(service.target) as harbor:
        pool = harbor.open_pool("l1", LAYOUT, 1001 * LAYOUT.block_bytes)

        def cycle(count: int) -> None:
            for _ in range(count):
                with pool.allocate(range(17)) as sequence:
                    sequence.commit(17)

        cycle(WARM_UP_CYCLES)
        before = private_kib(pid), open_descriptor_count(pid)
        cycle(CYCLES)
        after = private_kib(pid), open_descriptor_count(pid)
        counters = pool.stats().counters
    assert after[0] - before[0] < GROWTH_KIB
    assert after[1] == before[1]
    assert (counters.allocate_count, counters.hit_count) == (WARM_UP_CYCLES + CYCLES, WARM_UP_CYCLES + CYCLES - 1)
