"""C3: a request that can never fit."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.client_worker import BLOCK_TOKENS, LAYOUT
from kvharbor.client import Pool, PoolExhausted, RequestTooLarge, connect
from service_process import ServiceProcess
from waiting import quickest, seconds

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

    def too_large() -> None:
        with pytest.raises(RequestTooLarge) as refused:
            pool.allocate(blocks(usable + 1), wait_s=5)
        assert refused.value.metadata == {"neededBlockCount": "13", "usableBlockCount": "12"}
        assert refused.value.retry_after_s is None

    def answered_s() -> float:
        with ThreadPoolExecutor(1) as neighbour:
            served_s = neighbour.submit(seconds, lambda: other.allocate(blocks(1)).release())
            return max(seconds(too_large), served_s.result())

    assert quickest(answered_s, AT_ONCE_S) < AT_ONCE_S

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
