"""Pools in this process: what becomes of one that cannot be given back."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from kvharbor.gpumem import DataType, Layout, Plane
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.errors import Draining
from kvharbor.server.memory.arenas import HostArenas
from kvharbor.server.memory.part import HostPart
from kvharbor.server.memory.pool_memory import LedgerMemory
from kvharbor.server.pools.life import Life
from kvharbor.server.pools.pools import Pools
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from kvharbor.server.supervision.keeper import Unkept

LAYOUT = Layout("m", 16, (Plane.of_tokens("k", 1, 1, 16, DataType.FLOAT32, 16),))
SESSION = Session(1, "token", Peer(1, 1, "t", administrator=False), "test", "0")


@pytest.fixture
def keeper() -> Iterator[Unkept]:
    """Keeps nothing for anybody."""
    kept = Unkept()
    yield kept
    kept.close()


@pytest.mark.parametrize("broken", [(HostPart, "_let_go"), (LedgerMemory, "forget")])
def test_memory_of_a_dropped_pool_that_stays_ends_the_process(
    broken: tuple[type, str], keeper: Unkept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S12: it must not be freed while it may be mapped, nor booked for ever: the next process has neither."""
    crashes: list[BaseException] = []

    async def scenario() -> None:
        life = Life.begun(2**20)
        pools = Pools(Settings(), life, keeper, HostArenas(), clock=time.monotonic, crash=crashes.append)
        served, _ = await pools.declare("t", "p", LAYOUT, 11 * LAYOUT.block_bytes)
        with monkeypatch.context() as failing:
            failing.setattr(*broken, _fail)
            with pytest.raises(OSError, match="as the test wants it"):
                await pools.drop(SESSION, served.pool_id)
        assert [str(failure) for failure in crashes] == ["as the test wants it"]
        assert pools.all() == []
        if broken == (HostPart, "_let_go"):
            # This process goes on, and other tests look at its descriptors.
            await served.memory.close()
            served.page.close()
        await pools.close(Draining())

    asyncio.run(scenario())


def _fail(_: object) -> None:
    raise OSError("as the test wants it")
