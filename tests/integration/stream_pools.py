"""A pool for one test of streams, in as many sessions as it wants, on the service that tests share."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvharbor.v1 import pool_service_pb2
from raw_caller import RawCaller
from raw_stream import RawStream

BLOCK_COUNT = 16


@dataclass
class Party:
    """A session with its stream and the pool."""

    caller: RawCaller
    stream: RawStream
    pool_id: str


class Parties:
    """Opens sessions on the pool; `close` ends them and drops it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._name = f"test-{uuid.uuid4()}"
        self._open: list[Party] = []

    def join(self, *, block_count: int = BLOCK_COUNT, reads: bool = True) -> Party:
        """Opens another session with its stream."""
        caller = RawCaller(self._path)
        pool_id = caller.open_pool(self._name, block_count=block_count)
        self._open.append(Party(caller, RawStream(caller, reads=reads), pool_id))
        return self._open[-1]

    def close(self) -> None:
        """Leaves nothing."""
        for party in self._open:
            party.stream.close()
            party.caller.close()
        if self._open:
            with RawCaller(self._path) as caller:
                request = pool_service_pb2.DropPoolRequest(pool_id=self._open[0].pool_id)
                caller.call(caller.pools.DropPool, request)


@pytest.fixture
def parties(harbor: str) -> Iterator[Parties]:
    """Sessions with streams."""
    opened = Parties(harbor)
    yield opened
    opened.close()
