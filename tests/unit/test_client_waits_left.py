"""What a wait for room leaves behind when it has ended."""

from fake_chains import chain
from fake_service import FakeService
from kvharbor.client import Pool


def test_a_cancelled_wait_leaves_nothing_behind(service: FakeService, pool: Pool) -> None:
    """C18: an engine that gives up waits for years keeps none of them."""
    service.blocks.free_count, service.blocks.waits = 0, True
    for _ in range(3):
        (waiting,) = pool.blocks.acquire([chain(2, 3)], wait_s=5)
        assert waiting.grant is not None
        waiting.grant.cancel()
    pool.blocks.flush()
    assert pool.link.stream.unanswered.waiters == {}
