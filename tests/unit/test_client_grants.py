"""Waits for room: a grant, a release that is made meanwhile [C18], and what comes when nobody waits for it any more."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fake_chains import KEYS, acquire_numbers, chain, held, polled, published
from fake_service import DEADLINE_S, FakeService
from fake_stream import blocks_of, table
from integration.client_worker import LAYOUT
from kvharbor.client import Acquired, BlockRun, DeadlineExceeded, Pool, PoolExhausted, connect
from kvharbor.v1 import blocks_pb2, errors_pb2, types_pb2
from moments import GIVEN_UP_S, halt, once, wait, wait_for
from waiting import until

# A release must not end what was granted meanwhile


def test_a_release_does_not_end_what_an_unanswered_acquire_gives(service: FakeService, pool: Pool) -> None:
    """C18: it is sent after the answer, and without what that has given; all behind it waits with it."""
    blocks = published(pool, 2)
    other = pool.blocks.lease(1, 1).blocks
    asked, go_on = threading.Event(), threading.Event()
    once(service.blocks.after, "acquire", halt(asked, go_on))
    with ThreadPoolExecutor(1) as thread:
        acquiring = thread.submit(pool.blocks.acquire, [chain(2)])
        wait(asked)
        pool.blocks.release(BlockRun.join([blocks, other]))
        go_on.set()
        (got,) = acquiring.result(DEADLINE_S)
    pool.blocks.flush()
    assert [*got.held] == [*blocks]
    assert held(pool) == service.blocks.own == {*blocks}
    (released,) = service.blocks.of_kind("release_blocks")
    assert blocks_of(released.blocks) == [*other]


def test_a_grant_that_a_release_has_undone_is_asked_for_anew(service: FakeService, pool: Pool) -> None:
    """C18: what was released after the call may have ended what it is granted, so that is not relied on."""
    blocks = published(pool, 2)
    service.blocks.free_count, service.blocks.waits = 0, True
    (waiting,) = pool.blocks.acquire([chain(2, 5)], wait_s=5)
    pool.blocks.release(blocks)
    pool.blocks.flush()
    service.blocks.free_count, service.blocks.waits = 10, False
    service.blocks.own |= {(50, 1), (51, 1), (52, 1)}
    granted = blocks_pb2.AcquireResult(held=table(*blocks), leased=table((50, 1), (51, 1), (52, 1)))
    service.blocks.grant(acquire_numbers(service)[0], granted)
    got = polled(waiting)
    pool.blocks.flush()
    assert [*got.held] == [*blocks]
    assert held(pool) == service.blocks.own == {*blocks, *got.leased}


def test_a_grant_is_not_relied_on_while_a_release_of_it_is_on_its_way(service: FakeService, pool: Pool) -> None:
    """C18: the service may have taken it in already, or not."""
    blocks = published(pool, 2)
    service.blocks.free_count, service.blocks.waits = 0, True
    (waiting,) = pool.blocks.acquire([chain(2, 3)], wait_s=5)
    service.blocks.free_count = 10
    service.blocks.own.add((50, 1))
    asked, go_on = threading.Event(), threading.Event()
    once(service.blocks.before, "release_blocks", halt(asked, go_on))
    pool.blocks.release(blocks)
    wait(asked)
    service.blocks.grant(
        acquire_numbers(service)[0], blocks_pb2.AcquireResult(held=table(*blocks), leased=table((50, 1)))
    )
    until(lambda: len(pool.link.stream.unanswered.all()) == 3)
    go_on.set()
    got = polled(waiting)
    pool.blocks.flush()
    assert [*got.held] == [*blocks]
    assert held(pool) == service.blocks.own == {*blocks, *got.leased}


# Waits for room


def test_a_grant_is_polled(service: FakeService, pool: Pool) -> None:
    """None while it waits; what comes is held."""
    service.blocks.free_count, service.blocks.waits = 0, True
    (waiting,) = pool.blocks.acquire([chain(0, 1)], wait_s=5)
    assert waiting.waiting
    assert waiting.grant is not None
    assert waiting.grant.poll() is None
    service.blocks.own.add((50, 1))
    service.blocks.grant(acquire_numbers(service)[0], blocks_pb2.AcquireResult(leased=table((50, 1))))
    got = polled(waiting)
    assert [*got.leased] == [(50, 1)]
    assert held(pool) == {(50, 1)}


def test_a_wait_that_is_over_is_a_refusal(service: FakeService, pool: Pool) -> None:
    """Nothing is held."""
    service.blocks.free_count, service.blocks.waits = 0, True
    (waiting,) = pool.blocks.acquire([chain(0, 1)], wait_s=5)
    assert waiting.grant is not None
    status = types_pb2.ItemStatus(code=8, reason=errors_pb2.ERROR_REASON_POOL_EXHAUSTED)
    service.blocks.grant(acquire_numbers(service)[0], blocks_pb2.AcquireResult(status=status))
    assert isinstance(polled(waiting).refusal, PoolExhausted)
    assert held(pool) == set()


def test_what_a_cancelled_wait_is_granted_on_the_way_is_given_back(service: FakeService, pool: Pool) -> None:
    """The grant had left before the service saw the cancelling."""
    service.blocks.free_count, service.blocks.waits = 0, True
    (waiting,) = pool.blocks.acquire([chain(0, 1)], wait_s=5)
    assert waiting.grant is not None
    service.blocks.own.add((50, 1))
    once(
        service.blocks.before,
        "cancel_wait",
        lambda: service.blocks.grant(acquire_numbers(service)[0], blocks_pb2.AcquireResult(leased=table((50, 1)))),
    )
    waiting.grant.cancel()
    waiting.grant.cancel()
    assert isinstance(waiting.grant.poll(), Acquired)
    pool.blocks.flush()
    until(lambda: not service.blocks.own)
    pool.blocks.flush()
    assert held(pool) == set()
    assert len(service.blocks.of_kind("cancel_wait")) == 1


# Deadlines


def test_an_acquire_out_of_time_gives_back_what_comes_too_late(service: FakeService) -> None:
    """C4: but nothing that the session held before."""
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        blocks = published(pool, 2)
        pool.blocks.flush()
        service.blocks.content[KEYS[2]] = (40, 3)
        go_on = threading.Event()
        once(service.blocks.before, "acquire", wait_for(go_on))
        with pytest.raises(DeadlineExceeded):
            pool.blocks.acquire([chain(3, 5)], timeout_s=GIVEN_UP_S)
        go_on.set()
        until(lambda: service.blocks.of_kind("release_blocks"))
        pool.blocks.flush(DEADLINE_S)
        assert held(pool) == service.blocks.own == {*blocks}


def test_a_wait_that_begins_too_late_is_ended(service: FakeService, pool: Pool) -> None:
    """Its caller has no grant to cancel: the service must not keep it in line, and what it gives goes back."""
    service.blocks.waits, service.blocks.free_count = True, 0
    go_on = threading.Event()
    once(service.blocks.before, "acquire", wait_for(go_on))
    with pytest.raises(DeadlineExceeded):
        pool.blocks.acquire([chain(1, 1)], wait_s=DEADLINE_S, timeout_s=GIVEN_UP_S)
    go_on.set()
    (cancelled,) = until(lambda: service.blocks.of_kind("cancel_wait"))
    assert cancelled.request_number == service.blocks.requests[0].number
    pool.blocks.flush()
    assert held(pool) == set()


def test_a_flush_out_of_time_says_so(service: FakeService, pool: Pool) -> None:
    """What was sent still takes effect."""
    leased = pool.blocks.lease(1, 1).blocks
    go_on = threading.Event()
    once(service.blocks.before, "release_blocks", wait_for(go_on))
    pool.blocks.release(leased)
    with pytest.raises(DeadlineExceeded):
        pool.blocks.flush(timeout_s=0.05)
    go_on.set()
    pool.blocks.flush()
    assert held(pool) == service.blocks.own == set()


def test_what_an_invalidate_takes_back_too_late_is_given_back(service: FakeService) -> None:
    """C17: its caller has nothing of it, so nothing of it is held; the block before stays."""
    go_on = threading.Event()
    once(service.blocks.before, "invalidate_blocks", wait_for(go_on))
    with connect(service.target) as opened:
        pool = opened.open_pool("p", LAYOUT)
        blocks = published(pool, 2)
        with pytest.raises(DeadlineExceeded):
            pool.blocks.invalidate(blocks[1:], timeout_s=GIVEN_UP_S)
        go_on.set()
        until(lambda: service.blocks.of_kind("release_blocks"))
        pool.blocks.flush()
        assert held(pool) == service.blocks.own == {*blocks[:1]}
