"""Making a pool: what the owner itself keeps a block is asked for before it is taken."""

import mmap
import os
import tracemalloc

import pytest

from kvharbor.gpumem import DataType, InsufficientMemory, Layout, Plane
from kvharbor.pool import Ledger, Pool, PoolConfig, ledger_bytes
from kvharbor.server import pool_memory
from kvharbor.server.pool_memory import OWN_BYTES_A_BLOCK, pool_with_memory


def test_blocks_too_tiny_for_their_own_bookkeeping_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand million blocks of 16 bytes are 15 GiB, and many times that in the owner and in the ledger."""
    asked: list[int] = []

    def no_room(needed_bytes: int) -> None:
        asked.append(needed_bytes)
        raise InsufficientMemory(needed_bytes, available_bytes=1, limited_by="test")

    monkeypatch.setattr(pool_memory, "require_room", no_room)
    plane = Plane("k", 1, DataType.UINT8, 16, interior="opaque")
    descriptor = Layout("m", 16, (plane,), scratch_blocks=0).descriptor(10**9)
    config = PoolConfig(10**9, 16)
    with pytest.raises(InsufficientMemory):
        pool_with_memory(config, descriptor, "test", lambda: False)
    assert asked == [OWN_BYTES_A_BLOCK * 10**9 + ledger_bytes(config)]


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
    plane = Plane("k", 1, DataType.UINT8, 64, interior="opaque")
    descriptor = Layout("m", 16, (plane,), scratch_blocks=0).descriptor(1000)
    pool, memory = pool_with_memory(config, descriptor, "test", lambda: False)
    ledger = os.dup(memory.fds[1])
    try:
        assert os.fstat(ledger).st_blocks * 512 >= ledger_bytes(config)
        memory.close()
        memory.forget()
        assert os.fstat(ledger).st_blocks == 0
        assert pool.config == config
    finally:
        os.close(ledger)
