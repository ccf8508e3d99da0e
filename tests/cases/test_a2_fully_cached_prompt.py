"""A2: a prompt that is fully cached and ends on a block edge."""

from collections.abc import Iterator

import pytest

from integration.client_worker import WorkerProcess
from kvharbor.client import Lookup, connect
from service_process import ServiceProcess

pytestmark = pytest.mark.slow
# Each token of the case stands for four.
EIGHT, NINE = range(32), range(36)


@pytest.fixture
def workers(shared_service: ServiceProcess) -> Iterator[list[WorkerProcess]]:
    """Three sessions in three processes, on a pool of 8 blocks."""
    processes = [WorkerProcess(shared_service.target, "case-a2", 8) for _ in range(3)]
    yield processes
    for process in processes:
        process.end()


def test_a_fully_cached_prompt_leaves_its_last_block_to_compute_and_stays_intact(
    workers: list[WorkerProcess], shared_service: ServiceProcess
) -> None:
    """A2: Lookup and Allocate agree on one block to compute; it is a private one, never the shared block."""
    first, second, third = workers
    first.put(EIGHT, list(EIGHT))

    # (a)
    with connect(shared_service.target) as tool:
        assert tool.find_pool("case-a2").lookup(EIGHT) == Lookup(present_tokens=32, cached_tokens=16)

    # (b)
    written = second.allocate("b", EIGHT)
    assert written.cached_tokens == 16
    second.stamp("b", 16, [777.0] * 16)

    # (c)
    longer = third.allocate("c", NINE)
    assert (longer.cached_tokens, len(longer.table)) == (32, 3)
    assert longer.table[1] != written.table[1]
    assert third.read("c", 0, 32) == list(EIGHT)

    # Committing it publishes nothing over the shared block either: it becomes a shadow.
    second.commit("b", 32)
    assert second.switch_shadows("b").table == longer.table[:2]
    assert third.read("c", 0, 32) == second.read("b", 0, 32) == list(EIGHT)


def test_a_caller_that_needs_no_logits_may_reuse_all(workers: list[WorkerProcess]) -> None:
    """A2: with max_cached_tokens = len nothing is left to write, and no block is added."""
    first, second, _ = workers
    first.put(range(100, 132), list(range(32)))
    whole = second.allocate("b", range(100, 132), max_cached_tokens=32)
    assert (whole.cached_tokens, whole.capacity_tokens, len(whole.table)) == (32, 32, 2)
