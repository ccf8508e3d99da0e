"""What tests against a real service have: sessions with the shared one, and pools of their own there."""

import zlib
from collections.abc import Iterator

import pytest

import cuda_stub
from integration.client_kinds import open_harbor as open_harbor
from integration.cpp_sessions import python_pool as python_pool
from integration.cpp_sessions import start_worker as start_worker
from integration.services_on_stub import start_on_stub as start_on_stub
from kvharbor.client import Harbor, connect
from kvharbor.v1 import pool_service_pb2 as pools
from on_stub import nothing_here as nothing_here
from raw_caller import RawCaller
from service_process import ServiceProcess


@pytest.fixture
def target(shared_service: ServiceProcess) -> str:
    """The address of a service; each test has a pool of its own there."""
    return shared_service.target


@pytest.fixture
def pool_name(request: pytest.FixtureRequest) -> str:
    """A name that no other test's pool has."""
    return f"pool-{zlib.crc32(request.node.nodeid.encode()):x}"


@pytest.fixture
def harbors(harbor: str) -> Iterator[list[Harbor]]:
    """Two sessions of the shared service."""
    with connect(harbor) as one, connect(harbor) as other:
        yield [one, other]


@pytest.fixture
def caller(harbor: str) -> Iterator[RawCaller]:
    """A session with the shared service; it is an administrator's."""
    with RawCaller(harbor) as session:
        yield session


@pytest.fixture
def pool_id(caller: RawCaller, pool_name: str) -> Iterator[str]:
    """A pool of 64 blocks that is dropped again."""
    yield caller.open_pool(pool_name)
    caller.call(caller.pools.CloseSession, pools.CloseSessionRequest())


@pytest.fixture
def device() -> str:
    """A device of the stub of its own."""
    return cuda_stub.new_uuid()
