"""A8: fork with a half-full last block."""

import itertools
from collections.abc import Iterator

import pytest

from integration.client_worker import WorkerProcess
from kvharbor.client import PoolStats, connect
from service_process import ServiceProcess

pytestmark = pytest.mark.slow
# Each token of the case stands for four: blocks of 16 hold four of its tokens.
SIX = list(range(24))


def tail(child: int) -> list[int]:
    """What a child, or the source as number 0, generates after the fork."""
    return list(range(1000 * (child + 1), 1000 * (child + 1) + 8))


@pytest.fixture
def worker(shared_service: ServiceProcess, request: pytest.FixtureRequest) -> Iterator[WorkerProcess]:
    """The process that forks, on an empty pool of 8 blocks."""
    process = WorkerProcess(shared_service.target, pool_name(request), 8)
    yield process
    process.end()


@pytest.fixture
def reader(shared_service: ServiceProcess, request: pytest.FixtureRequest) -> Iterator[WorkerProcess]:
    """Another process on the same pool."""
    process = WorkerProcess(shared_service.target, pool_name(request), 8)
    yield process
    process.end()


def pool_name(request: pytest.FixtureRequest) -> str:
    return "case-a8-" + "".join(letter for letter in request.node.name if letter.isalnum())[-40:]


def stats(service: ServiceProcess, request: pytest.FixtureRequest) -> PoolStats:
    with connect(service.target) as tool:
        return tool.find_pool(pool_name(request)).stats()


@pytest.mark.parametrize(
    ("child_count", "order"),
    [*((1, order) for order in itertools.permutations(range(2))), (3, (0, 1, 2, 3)), (3, (2, 0, 3, 1))],
)
def test_source_and_children_diverge_and_are_released_in_any_order(
    worker: WorkerProcess,
    reader: WorkerProcess,
    shared_service: ServiceProcess,
    request: pytest.FixtureRequest,
    child_count: int,
    order: tuple[int, ...],
) -> None:
    """A8: the full block is shared, each tail is its own copy of the source's, and every block is released once."""
    names = [f"sequence{number}" for number in range(child_count + 1)]
    worker.allocate(names[0], SIX)
    worker.stamp(names[0], 0, SIX)
    worker.commit(names[0], 24)
    worker.fork(names[0], names[1:], reserve_tokens=8)
    for number, name in enumerate(names):
        worker.stamp(name, 24, tail(number))
        worker.commit(name, 32, tail(number))

    tables = [worker.snapshot(name).table for name in names]
    assert {table[0] for table in tables} == {tables[0][0]}
    assert len({table[1] for table in tables}) == child_count + 1
    for number, name in enumerate(names):
        assert worker.read(name, 0, 32) == SIX + tail(number)
    assert stats(shared_service, request).active_block_count == child_count + 2

    for number in range(child_count + 1):
        held = reader.allocate("held", SIX + tail(number), max_cached_tokens=32)
        assert held.cached_tokens == 32
        assert reader.read("held", 0, 32) == SIX + tail(number)
        reader.release("held")

    for number in order:
        worker.release(names[number])
    after = stats(shared_service, request)
    assert (after.active_block_count, after.reserved_block_count, after.sequence_count) == (0, 0, 0)
    assert (after.cached_block_count, after.free_block_count) == (child_count + 2, 8 - child_count - 2)
