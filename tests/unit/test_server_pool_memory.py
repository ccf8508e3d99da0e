"""Making a pool: what the owner itself keeps a block is asked for before it is taken."""

import pytest

from kvharbor.gpumem import DataType, InsufficientMemory, Layout, Plane
from kvharbor.pool import PoolConfig
from kvharbor.server import served_pool
from kvharbor.server.served_pool import pool_with_memory


def test_blocks_too_tiny_for_their_own_bookkeeping_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand million blocks of 16 bytes are 15 GiB, and four times that in the owner."""
    asked: list[int] = []

    def no_room(needed_bytes: int) -> None:
        asked.append(needed_bytes)
        raise InsufficientMemory(needed_bytes, available_bytes=1, limited_by="test")

    monkeypatch.setattr(served_pool, "require_room", no_room)
    plane = Plane("k", 1, DataType.UINT8, 16, interior="opaque")
    descriptor = Layout("m", 16, (plane,), scratch_blocks=0).descriptor(10**9)
    with pytest.raises(InsufficientMemory):
        pool_with_memory(PoolConfig(10**9, 16), descriptor, "test", lambda: False)
    assert asked == [64 * 10**9]
