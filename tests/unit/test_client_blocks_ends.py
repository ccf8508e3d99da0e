"""What ends block calls: an epoch, a close, a harbor that is forgotten."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fake_chains import chain, held, published
from fake_service import DEADLINE_S, FakeService
from integration.client_worker import LAYOUT
from kvharbor.client import BlockRun, EpochEnded, Harbor, HarborClosed, ServiceUnreachable, connect
from moments import halt, once, wait
from waiting import until


def test_a_new_epoch_voids_everything(service: FakeService) -> None:
    """C17: nothing is named, nothing is sent again; calls go on in the new one."""
    epochs: list[str] = []
    with connect(service.target, on_epoch=lambda *pair: epochs.append(pair[1])) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        leased = pool.blocks.lease(2, 2).blocks
        service.blocks.free_count, service.blocks.waits = 0, True
        (waiting,) = pool.blocks.acquire([chain(0, 1)], wait_s=5)
        assert waiting.grant is not None
        service.kill()
        until(lambda: not pool.link.standing.settled(even_away=False))
        pool.blocks.release(leased[:1])
        service.blocks.free_count = 9
        service.new_epoch()
        until(lambda: epochs)
        # A call of the old session may reach the new process first: a real one does not know its token.
        served = len(service.blocks.requests)
        with pytest.raises((EpochEnded, ServiceUnreachable)):  # the end of the process may be seen first
            until(waiting.grant.poll)
        fresh = pool.blocks.lease(1, 1).blocks
        assert [each.WhichOneof("call") for each in service.blocks.requests[served:]] == ["lease"]
        assert held(pool) == {*fresh}
        pool.blocks.flush()


def test_a_call_that_is_made_while_an_epoch_begins_is_of_the_new_one(service: FakeService) -> None:
    """It waits for that; what was told of blocks that are void by then is no refusal."""
    acquiring: list[Any] = []
    with ThreadPoolExecutor(1) as thread:

        def on_epoch(*_: str) -> None:
            pool.blocks.release(leased)
            acquiring.append(thread.submit(pool.blocks.acquire, [chain(0, 2)]))
            until(lambda: acquiring[0].running())

        with connect(service.target, on_epoch=on_epoch) as harbor:
            pool = harbor.open_pool("p", LAYOUT)
            leased = pool.blocks.lease(1, 1).blocks
            service.new_epoch()
            until(lambda: acquiring)
            (got,) = acquiring[0].result(DEADLINE_S)
            pool.blocks.flush()
            assert held(pool) == {*got.leased}


def test_a_close_waits_for_what_was_sent(service: FakeService) -> None:
    """What was written is published, though nobody has awaited it."""
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        blocks = published(pool, 8)
        once(service.blocks.before, "release_blocks", lambda: until(lambda: pool.link.standing.closing))
        for _ in range(300):
            pool.blocks.release(blocks[:1])
    assert len(service.blocks.of_kind("release_blocks")) == 300
    for call in (lambda: pool.blocks.lease(1, 1), pool.blocks.flush, lambda: pool.blocks.release(BlockRun.of([]))):
        with pytest.raises(HarborClosed):
            call()


def test_a_close_ends_a_call_that_another_thread_waits_in(service: FakeService) -> None:
    """With HarborClosed, and at once."""
    go_on, asked = threading.Event(), threading.Event()
    with connect(service.target) as harbor, ThreadPoolExecutor(1) as thread:
        pool = harbor.open_pool("p", LAYOUT)
        service.blocks.before["acquire"] = halt(asked, go_on)
        acquiring = thread.submit(pool.blocks.acquire, [chain(0, 1)])
        wait(asked)
        pool.link.close()
        with pytest.raises(HarborClosed):
            acquiring.result(DEADLINE_S)
        go_on.set()


def test_a_forgotten_harbor_with_a_stream_ends_its_session(service: FakeService) -> None:
    """Neither the thread that reads nor the one that sends keeps it alive."""
    harbor: Harbor | None = connect(service.target)
    assert harbor is not None
    harbor.open_pool("p", LAYOUT).blocks.lease(1, 1)
    threads = [each for each in threading.enumerate() if each.name == "kvharbor-stream"]
    connection = service.accepted[0]
    connection.setblocking(False)
    del harbor
    gc.collect()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [thread.is_alive() for thread in threads] == [False]
