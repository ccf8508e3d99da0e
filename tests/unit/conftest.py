"""What a test of the client has: a fake of the service, whose process ends at exactly the moment the test wants."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_on_devices import make_ipc as make_ipc
from fake_on_devices import make_vmm as make_vmm
from fake_on_devices import start_fake as start_fake
from fake_service import FakeService
from integration.client_kinds import open_harbor as open_harbor
from integration.client_worker import LAYOUT
from kvharbor.client import Credits, DecodeBatch, Pool, connect
from on_stub import ipc_owner as ipc_owner
from on_stub import nothing_here as nothing_here
from waiting import until


@pytest.fixture
def block_count() -> int:
    """How many blocks the fake's pool has; a module that needs more of them has its own."""
    return 64


@pytest.fixture
def service(tmp_path: Path, block_count: int) -> Iterator[FakeService]:
    """The fake, with its process running."""
    fake = FakeService(tmp_path, LAYOUT, block_count)
    yield fake
    fake.close()


@pytest.fixture
def pool(service: FakeService) -> Iterator[Pool]:
    """An open pool of the synchronous client."""
    with connect(service.target) as harbor:
        yield harbor.open_pool("p", LAYOUT)


@pytest.fixture
def credits(service: FakeService, pool: Pool) -> Iterator[Credits]:
    """Enough of them for a while, of a pool with enough blocks."""
    service.blocks.free_count = 400
    stock = Credits(pool, 64)
    until(lambda: len(stock) == 64)
    yield stock
    stock.close()


@pytest.fixture
def batch(pool: Pool, credits: Credits) -> DecodeBatch:
    """An empty one."""
    return DecodeBatch(pool, credits)
