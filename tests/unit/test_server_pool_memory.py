"""Making a pool: what the owner itself keeps a block is asked for before it is taken."""

import tracemalloc

import pytest

from kvharbor.gpumem import DataType, InsufficientMemory, Layout, Plane
from kvharbor.pool import Pool, PoolConfig
from kvharbor.server import served_pool
from kvharbor.server.served_pool import OWN_BYTES_A_BLOCK, pool_with_memory


def test_blocks_too_tiny_for_their_own_bookkeeping_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand million blocks of 16 bytes are 15 GiB, and six times that in the owner."""
    asked: list[int] = []

    def no_room(needed_bytes: int) -> None:
        asked.append(needed_bytes)
        raise InsufficientMemory(needed_bytes, available_bytes=1, limited_by="test")

    monkeypatch.setattr(served_pool, "require_room", no_room)
    plane = Plane("k", 1, DataType.UINT8, 16, interior="opaque")
    descriptor = Layout("m", 16, (plane,), scratch_blocks=0).descriptor(10**9)
    with pytest.raises(InsufficientMemory):
        pool_with_memory(PoolConfig(10**9, 16), descriptor, "test", lambda: False)
    assert asked == [OWN_BYTES_A_BLOCK * 10**9]


def test_an_empty_pool_takes_no_more_than_is_asked_for() -> None:
    """The constant that the room is computed with is what a pool really keeps, within a fifth."""
    block_count = 100_000
    tracemalloc.start()
    try:
        pool = Pool(PoolConfig(block_count, 16))
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert pool.stats().free_block_count == block_count
    assert 0.8 * OWN_BYTES_A_BLOCK <= kept_bytes / block_count <= OWN_BYTES_A_BLOCK
