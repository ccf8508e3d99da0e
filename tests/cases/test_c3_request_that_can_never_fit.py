"""C3: a request that can never fit."""

import threading
import time
from collections.abc import Iterator

import pytest

from integration.client_worker import BLOCK_TOKENS, LAYOUT
from kvharbor.client import Pool, PoolExhausted, RequestTooLarge, connect
from service_process import ServiceProcess

pytestmark = pytest.mark.slow
# The case's 200 ms, for a machine that is busy with other tests. Waiting would take 5 s.
AT_ONCE_S = 1.0


@pytest.fixture
def pools(shared_service: ServiceProcess) -> Iterator[tuple[Pool, Pool]]:
    """Two clients of a pool of 13 blocks, scratch included."""
    with connect(shared_service.target) as one, connect(shared_service.target) as two:
        size = 13 * LAYOUT.block_bytes
        yield one.open_pool("case-c3", LAYOUT, size), two.open_pool("case-c3", LAYOUT)


def blocks(count: int, first: int = 0) -> range:
    """A prompt of so many blocks."""
    return range(first, first + count * BLOCK_TOKENS)


def test_the_usable_number_is_admitted_and_one_more_is_refused_for_ever(pools: tuple[Pool, Pool]) -> None:
    """C3: at once, with both numbers, without advice to retry, and without holding up anybody behind it."""
    pool, other = pools
    usable = pool.stats().total_block_count
    assert usable == 12
    pool.allocate(blocks(usable)).release()

    served_s: list[float] = []

    def small_request() -> None:
        started = time.monotonic()
        other.allocate(blocks(1)).release()
        served_s.append(time.monotonic() - started)

    neighbour = threading.Thread(target=small_request)
    started = time.monotonic()
    neighbour.start()
    with pytest.raises(RequestTooLarge) as refused:
        pool.allocate(blocks(usable + 1), wait_s=5)
    refused_s = time.monotonic() - started
    neighbour.join()
    assert refused.value.metadata == {"neededBlockCount": "13", "usableBlockCount": "12"}
    assert refused.value.retry_after_s is None
    assert max(refused_s, *served_s) < AT_ONCE_S

    warm = pool.warmup(blocks(3, first=10_000), "pinned")
    assert warm.sequence is not None
    with warm.sequence as prefix:
        prefix.commit(3 * BLOCK_TOKENS)
    with pytest.raises(PoolExhausted) as full:
        pool.allocate(blocks(usable - 2, first=20_000))
    assert full.value.metadata["warmBlockCount"] == "3"
    assert full.value.retry_after_s is not None
    pool.allocate(blocks(usable - 3, first=20_000)).release()
    pool.unwarm("pinned")
