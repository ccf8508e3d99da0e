"""Sessions that share a pool made for one test, on a service that other tests use too."""

import uuid
from collections.abc import Iterator

import pytest

from kvharbor.client import Harbor, Pool, connect
from kvharbor.gpumem import Layout


class PoolSessions:
    """Opens one pool, under a name of its own, in as many sessions as a test wants; `close` removes it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._name = f"test-{uuid.uuid4()}"
        self._harbors: list[Harbor] = []

    def open(self, layout: Layout, block_count: int) -> Pool:
        """Opens the pool in a new session; `block_count` includes the scratch blocks."""
        self._harbors.append(connect(self._target, client_name="test"))
        return self._harbors[-1].open_pool(self._name, layout, block_count * layout.block_bytes)

    def close(self) -> None:
        """Ends the sessions and gives the pool's memory back."""
        for harbor in self._harbors:
            harbor.close()
        with connect(self._target) as harbor:
            harbor.drop_pool(self._name)


@pytest.fixture
def sessions(harbor: str) -> Iterator[PoolSessions]:
    """Sessions on a pool for this test."""
    opened = PoolSessions(harbor)
    yield opened
    opened.close()
