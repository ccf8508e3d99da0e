"""Sessions of the C++ client, and a pool of the Python client beside them."""

from collections.abc import Callable, Iterator

import pytest

from cpp_worker import CppWorker
from integration.client_worker import LAYOUT, pool_size
from kvharbor.client import Pool, connect
from service_process import DEADLINE_S, ServiceProcess

MODEL = LAYOUT.model
StartWorker = Callable[..., CppWorker]


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    """Starts C++ workers with a session, and the memory of a pool if it is named."""
    started: list[CppWorker] = []

    def start(
        service: ServiceProcess, pool_name: str = "", block_count: int = 8, timeout_s: float = DEADLINE_S
    ) -> CppWorker:
        started.append(CppWorker.connected(service.socket, timeout_s=timeout_s))
        if pool_name:
            started[-1].open(pool_name, MODEL, 1, pool_size(block_count))
            started[-1].attach(0)
        return started[-1]

    yield start
    for worker in started:
        worker.discard()


@pytest.fixture
def python_pool(shared_service: ServiceProcess, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A pool of the Python client, of the test's own name and eight blocks."""
    with connect(shared_service.target) as harbor:
        yield harbor.open_pool(request.node.name[:64], LAYOUT, pool_size(8))


def stamps_of(tokens: list[int]) -> list[int]:
    """What is written for each token: whole numbers that float32 holds exactly."""
    return [token * 31 % 9973 + place for place, token in enumerate(tokens)]
