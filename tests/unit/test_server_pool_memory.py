"""Making a pool: what the owner itself keeps a block is asked for before it is taken."""

import asyncio
import mmap
import os
import threading
import tracemalloc

import pytest

from kvharbor.gpumem import ArenaUnfit, DataType, InsufficientMemory, Layout, Plane
from kvharbor.pool import Ledger, Pool, PoolConfig, ledger_bytes
from kvharbor.server.memory import arenas, pool_memory
from kvharbor.server.memory.arenas import HostArenas
from kvharbor.server.memory.pool_memory import OWN_BYTES_A_BLOCK, PoolMemory, pool_with_ledger, recovered_pool

PLANE = Plane("k", 1, DataType.UINT8, 64, interior="opaque")
LAYOUT = Layout("m", 16, (PLANE,), scratch_blocks=0, tp_size=2)
DESCRIPTOR = LAYOUT.descriptor(8)


def not_cancelled() -> bool:
    """Nothing is shutting down."""
    return False


async def made(part_count: int) -> PoolMemory:
    """Returns the memory of a pool of 8 blocks, the caller's to close."""
    _, ledger = pool_with_ledger(PoolConfig(8, 16), "test", not_cancelled)
    parts = await HostArenas().make([""] * part_count, DESCRIPTOR.size_bytes, "test", not_cancelled)
    return PoolMemory(parts, ledger)


def test_blocks_too_tiny_for_their_own_bookkeeping_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand million blocks of 16 bytes are 15 GiB, and many times that in the owner and in the ledger."""
    asked: list[int] = []

    def no_room(needed_bytes: int) -> None:
        asked.append(needed_bytes)
        raise InsufficientMemory(needed_bytes, available_bytes=1, limited_by="test")

    monkeypatch.setattr(pool_memory, "require_room", no_room)
    config = PoolConfig(10**9, 16)
    with pytest.raises(InsufficientMemory):
        pool_with_ledger(config, "test", not_cancelled)
    assert asked == [OWN_BYTES_A_BLOCK * 10**9 + ledger_bytes(config)]


def test_a_ledger_that_is_too_small_is_not_read() -> None:
    """As that of a version which kept less may be: before anything beyond its end is touched."""
    _, ledger = pool_with_ledger(PoolConfig(8, 16), "test", not_cancelled)
    with pytest.raises(ArenaUnfit):
        recovered_pool(PoolConfig(100_000, 16), os.dup(ledger.arena.fd), {}, 1)
    ledger.close()


def test_an_empty_pool_takes_no_more_than_is_asked_for() -> None:
    """The constant that the room is computed with is what a pool really keeps beside its ledger, within a fifth."""
    block_count = 100_000
    config = PoolConfig(block_count, 16)
    region = mmap.mmap(-1, ledger_bytes(config))
    tracemalloc.start()
    try:
        pool = Pool(config, Ledger.create(config, region))
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert pool.stats().free_block_count == block_count
    assert 0.8 * OWN_BYTES_A_BLOCK <= kept_bytes / block_count <= OWN_BYTES_A_BLOCK


def test_a_dropped_pool_gives_back_its_ledger_while_that_is_still_mapped() -> None:
    """The pool's columns are views of it, and when they are collected is nobody's to say."""
    config = PoolConfig(1000, 16)
    pool, ledger = pool_with_ledger(config, "test", not_cancelled)
    fd = os.dup(ledger.arena.fd)
    try:
        assert os.fstat(fd).st_blocks * 512 >= ledger_bytes(config)
        ledger.close()
        ledger.forget()
        assert os.fstat(fd).st_blocks == 0
        assert pool.config == config
    finally:
        os.close(fd)


@pytest.mark.usefixtures("no_leaks")
def test_the_room_for_all_parts_is_asked_for_before_the_first_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """M4: a pool of several parts is not half reserved when the room turns out to be too little."""
    asked: list[int] = []

    def no_room(needed_bytes: int, _: int) -> None:
        asked.append(needed_bytes)
        raise InsufficientMemory(needed_bytes, available_bytes=1, limited_by="test")

    monkeypatch.setattr(arenas, "require_room", no_room)
    with pytest.raises(InsufficientMemory):
        asyncio.run(HostArenas().make(["", "", ""], 4096, "test", not_cancelled))
    assert asked == [3 * 4096]


@pytest.mark.usefixtures("no_leaks")
def test_a_copy_is_made_in_every_part() -> None:
    """Each rank's part has its own bytes of a block, and its own copy of them."""

    async def scenario() -> None:
        memory = await made(2)
        for rank, part in enumerate(memory.parts):
            os.pwrite(part.export.fds[0], bytes([rank + 1] * 64), 64 * 3)
        await memory.copy(DESCRIPTOR, [(3, 5)])
        assert [os.pread(part.export.fds[0], 64, 64 * 5) for part in memory.parts] == [b"\1" * 64, b"\2" * 64]
        await memory.close()

    asyncio.run(scenario())


def test_a_failed_copy_is_told_when_no_part_is_written_any_more() -> None:
    """The destinations are given back then: what still writes there would write into somebody's block."""

    async def scenario() -> None:
        memory = await made(2)
        may_go_on = threading.Event()
        memory.parts[1].thread.submit(may_go_on.wait)
        copying = asyncio.create_task(memory.copy(DESCRIPTOR, [(3, 9)]))
        done, _ = await asyncio.wait([copying], timeout=0.05)
        assert not done
        may_go_on.set()
        with pytest.raises(Exception, match="block 9"):
            await copying
        await memory.close()

    asyncio.run(scenario())
