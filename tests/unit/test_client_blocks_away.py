"""Block calls over the death of the process: what is told to the next one, what is sent again, and what fails."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fake_chains import KEYS, SPACE, chain, held, published
from fake_service import DEADLINE_S, FakeService
from fake_stream import blocks_of
from integration.client_worker import LAYOUT
from kvharbor.client import BlockNotHeld, CommitChain, Pool, ServiceAway, ServiceUnreachable, connect
from moments import halt, once, wait
from waiting import until


def test_what_is_held_is_told_to_the_next_process(service: FakeService, pool: Pool) -> None:
    """C17: as of the last answer; what is unanswered is sent again, in order, and an acquire fails."""
    kept, given, written = (pool.blocks.lease(1, 1).blocks for _ in range(3))
    asked, go_on = threading.Event(), threading.Event()
    service.blocks.before["commit_blocks"] = halt(asked, go_on)
    pool.blocks.commit([CommitChain(blocks=written, keys=KEYS[0], namespace=SPACE)])
    pool.blocks.release(given)
    wait(asked)
    service.kill()
    go_on.set()
    service.blocks.before.clear()
    served = len(service.blocks.requests)
    service.begin()
    told = service.wait_until_resumed()
    assert {*blocks_of(told.blocks)} == {*kept, *given, *written}
    pool.blocks.flush()
    assert [each.WhichOneof("call") for each in service.blocks.requests[served:]] == ["commit_blocks", "release_blocks"]
    assert held(pool) == service.blocks.own == {*kept, *written}
    assert service.blocks.content == {KEYS[0]: next(iter(written))}


def test_a_release_that_took_effect_in_a_process_that_died_is_no_refusal(service: FakeService, pool: Pool) -> None:
    """C17: the ledger has those blocks not as the session's any more, as the engine has wanted it."""
    blocks = published(pool, 2)
    pool.blocks.flush()
    once(service.blocks.after, "release_blocks", service.restart)
    pool.blocks.release(blocks[1:])
    pool.blocks.flush()
    assert held(pool) == service.blocks.own == {*blocks[:1]}


def test_what_is_abandoned_and_not_answered_is_said_again(service: FakeService, pool: Pool) -> None:
    """C17: to the next process, which knows nothing of it."""
    once(service.blocks.after, "abandon", service.restart)
    pool.blocks.abandon([chain(1, 1)])
    pool.blocks.flush()
    assert len(service.blocks.of_kind("abandon")) == 2


def test_an_unanswered_acquire_fails_and_leaves_nothing_held(service: FakeService, pool: Pool) -> None:
    """C17: it has taken effect in the process that died, and is not named to the next one."""
    once(service.blocks.after, "acquire", service.restart)
    with pytest.raises(ServiceUnreachable):
        pool.blocks.acquire([chain(0, 3)])
    assert blocks_of(service.wait_until_resumed().blocks) == []
    assert held(pool) == service.blocks.own == set()
    assert len(pool.blocks.lease(1, 1).blocks) == 1


def test_a_wait_for_room_ends_with_the_process(service: FakeService, pool: Pool) -> None:
    """The next one knows nothing of it."""
    service.blocks.free_count, service.blocks.waits = 0, True
    (waiting,) = pool.blocks.acquire([chain(0, 1)], wait_s=5)
    assert waiting.grant is not None
    service.restart()
    service.wait_until_resumed()
    with pytest.raises(ServiceUnreachable):
        until(waiting.grant.poll)


def test_calls_go_on_while_the_service_is_away(service: FakeService, pool: Pool) -> None:
    """Commits and releases return at once; an acquire waits for the next process."""
    leased = pool.blocks.lease(2, 2).blocks
    service.kill()
    pool.blocks.commit([CommitChain(blocks=leased[:1], keys=KEYS[0], namespace=SPACE)])
    pool.blocks.release(leased[1:])
    with ThreadPoolExecutor(1) as thread:
        until(lambda: pool.link.standing.settled(even_away=False) is False)
        acquiring = thread.submit(pool.blocks.acquire, [chain(1)])
        service.begin()
        (got,) = acquiring.result(DEADLINE_S)
    assert [*got.held] == [*leased[:1]]
    pool.blocks.flush()
    assert held(pool) == service.blocks.own == {*leased[:1]}


def test_nobody_waits_longer_than_asked_for_a_service_that_is_away(service: FakeService) -> None:
    """`away_wait_s` and `timeout_s` bound an acquire and a flush."""
    with connect(service.target, away_wait_s=0.0) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        leased = pool.blocks.lease(1, 1).blocks
        service.kill()
        until(lambda: not pool.link.standing.settled(even_away=False))
        with pytest.raises(ServiceAway):
            pool.blocks.acquire([chain(0, 1)])
        pool.blocks.release(leased)
        with pytest.raises(ServiceAway):
            pool.blocks.flush(timeout_s=0.05)
        service.begin()


def test_blocks_that_the_ledger_does_not_have_are_an_error(service: FakeService, pool: Pool) -> None:
    """C17: nothing else tells the engine that what it holds is not its own."""
    leased = pool.blocks.lease(2, 2).blocks
    service.kill()
    service.blocks.kept.discard([*leased][1])
    service.begin()
    service.wait_until_resumed()
    until(lambda: len(pool.own_blocks) == 1)
    with pytest.raises(BlockNotHeld, match="not as this session's any more"):
        pool.blocks.flush()
    assert held(pool) == {*leased[:1]}


def test_a_stream_that_breaks_off_alone_is_opened_anew(service: FakeService, pool: Pool) -> None:
    """The process lives: nothing is told with Resume, and what is unanswered is sent again."""
    leased = pool.blocks.lease(2, 2).blocks
    once(service.blocks.after, "release_blocks", service.blocks.break_off)
    pool.blocks.release(leased[:1])
    pool.blocks.flush()
    assert held(pool) == service.blocks.own == {*leased[1:]}
    assert service.calls["Resume"] == []


def test_an_acquire_that_has_not_left_is_made_in_the_next_process(service: FakeService, pool: Pool) -> None:
    """It stood behind another: nothing can have come of it, so its caller need not know."""
    go_on, asked = threading.Event(), threading.Event()
    leased = pool.blocks.lease(1, 1).blocks
    once(service.blocks.before, "acquire", halt(asked, go_on))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pool.blocks.acquire, [chain(0, 1)])
        wait(asked)
        pool.blocks.release(leased)
        second = threads.submit(pool.blocks.acquire, [chain(0, 2)])
        until(lambda: len(pool.link.stream.unanswered.all()) == 3)
        service.kill()
        go_on.set()
        service.begin()
        with pytest.raises(ServiceUnreachable):
            first.result(DEADLINE_S)
        (got,) = second.result(DEADLINE_S)
    assert held(pool) == service.blocks.own == {*got.leased}
