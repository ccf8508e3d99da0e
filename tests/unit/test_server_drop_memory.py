"""What a dropped pool leaves in the service's process: no memory of arenas, which others would take for left behind."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvharbor.gpumem import InsufficientMemory
from kvharbor.pool.steps import finish
from kvharbor.server.memory import arenas
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from sessions_here import TENANT, run, sessions_here

Mapped = Callable[[], set[str]]
"""What this process maps of arenas since the test began."""


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    """Without the collector: whatever goes here goes by itself."""

    def arenas_mapped() -> set[str]:
        return {line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:kvharbor" in line}

    gc.disable()
    before = arenas_mapped()
    yield lambda: arenas_mapped() - before
    gc.enable()


def member() -> Session:
    """Returns a session."""
    return Session(1, "token", Peer(1, 1, TENANT, administrator=False), "test", "0")


def test_a_dropped_pool_maps_nothing_and_is_gone(tmp_path: Path, mapped: Mapped) -> None:
    """What the pool knew of its blocks goes as well: of a million that is 80 MB."""

    async def scenario() -> None:
        async with sessions_here(tmp_path) as here:
            session = member()
            opened = await here.opened(session)
            assert len(mapped()) == 2  # ledger and status page; parts are mapped for copies only
            pool, pool_id = weakref.ref(opened.served.pool), opened.served.pool_id
            del opened
            assert await here.pools.drop(session, pool_id)
            assert mapped() == set()
            assert pool() is None

    run(scenario())


def test_a_dropped_pool_that_somebody_still_reads_maps_nothing(tmp_path: Path, mapped: Mapped) -> None:
    """Its columns read as zeros then, which is no end of the process."""

    async def scenario() -> None:
        async with sessions_here(tmp_path) as here:
            session = member()
            served = (await here.opened(session)).served
            finish(served.pool.release(1, (await here.allocate(session, *range(16))).number))
            assert await here.pools.drop(session, served.pool_id)
            assert mapped() == set()
            assert served.pool.stats().free_block_count == 16

    run(scenario())


def test_a_pool_that_is_refused_maps_nothing(tmp_path: Path, mapped: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ledger was there when its parts found no room."""

    def no_room(needed_bytes: int, _: int) -> None:
        raise InsufficientMemory(needed_bytes, available_bytes=1, limited_by="test")

    async def scenario() -> None:
        async with sessions_here(tmp_path) as here:
            monkeypatch.setattr(arenas, "require_room", no_room)
            session = member()
            with pytest.raises(InsufficientMemory) as refused:
                await here.opened(session)
            assert mapped() == set()
            assert refused.value.limited_by == "test"

    run(scenario())
