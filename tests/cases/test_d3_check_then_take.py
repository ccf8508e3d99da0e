"""D3: check-then-take at the edge of capacity."""

import threading

import pytest

from integration.client_worker import BLOCK_TOKENS, LAYOUT, pool_size
from kvharbor.client import Pool, PoolExhausted, PoolStats, Sequence, connect
from service_process import ServiceProcess

pytestmark = pytest.mark.slow
THREADS, ROUNDS, BLOCKS_EACH, TOTAL = 8, 200, 3, 16


class Hammer:
    """Threads that all allocate at the same moment, round after round, and keep what they got."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.barrier = threading.Barrier(THREADS + 1)
        self.granted: list[Sequence] = []
        self.refused: list[PoolExhausted] = []

    def run(self, thread: int) -> None:
        for turn in range(ROUNDS):
            fresh = (turn * THREADS + thread) * 1000
            self.barrier.wait(30)
            try:
                self.granted.append(self._pool.allocate(range(fresh, fresh + BLOCKS_EACH * BLOCK_TOKENS)))
            except PoolExhausted as refusal:
                self.refused.append(refusal)
            self.barrier.wait(30)


def test_at_the_edge_exactly_as_many_succeed_as_fit(shared_service: ServiceProcess) -> None:
    """D3: 5 of 8 requests for 3 of 16 blocks, every round; every statistics reading adds up meanwhile [G5]."""
    with connect(shared_service.target) as harbor, connect(shared_service.target) as watcher:
        pool = harbor.open_pool("case-d3", LAYOUT, pool_size(TOTAL))
        readings: list[PoolStats] = []
        done = threading.Event()

        def poll() -> None:
            handle = watcher.find_pool("case-d3")
            while not done.is_set():
                readings.append(handle.stats())

        hammer = Hammer(pool)
        threads = [threading.Thread(target=poll)]
        threads += [threading.Thread(target=hammer.run, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(ROUNDS):
                hammer.barrier.wait(30)
                hammer.barrier.wait(30)
                held = [int(block) for sequence in hammer.granted for block in sequence.table]
                assert (len(hammer.granted), len(hammer.refused), len(set(held))) == (5, 3, 15)
                assert pool.stats().free_block_count == 1
                for sequence in hammer.granted:
                    sequence.release()
                hammer.granted.clear()
                hammer.refused.clear()
        finally:
            hammer.barrier.abort()
            done.set()
            for thread in threads:
                thread.join(30)
        assert readings
        assert {total(reading) for reading in readings} == {TOTAL}


def total(stats: PoolStats) -> int:
    """The sum of the classes."""
    return (
        stats.free_block_count
        + stats.reserved_block_count
        + stats.active_block_count
        + stats.cached_block_count
        + stats.warm_block_count
        + stats.quarantined_block_count
    )
