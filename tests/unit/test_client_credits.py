"""Leased blocks in stock. The service is a fake."""

import gc
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from fake_service import DEADLINE_S, FakeService
from integration.client_worker import LAYOUT
from kvharbor.client import BlockRun, Credits, InvalidField, Pool, PoolExhausted, connect, credits
from kvharbor.client.link import Link
from moments import wait_for
from waiting import until


@pytest.fixture
def block_count() -> int:
    return 512


def test_taking_makes_no_call_and_the_stock_is_refilled_behind(service: FakeService, pool: Pool) -> None:
    """C19: growth leases, one at a time, as soon as a quarter of it is gone."""
    credits = Credits(pool, 8)
    until(lambda: len(credits) == 8)
    first = credits.take(1)
    assert (len(first), len(credits), len(service.blocks.of_kind("lease"))) == (1, 7, 1)
    second = credits.take(3)
    until(lambda: len(credits) == 8)
    asked = service.blocks.of_kind("lease")
    assert [(each.least_block_count, each.want_block_count, each.growth) for each in asked] == [
        (0, 8, True),
        (0, 4, True),
    ]
    assert {*pool.own_blocks.all()} == service.blocks.own
    assert len({*first, *second}) == 4
    credits.close()


def test_more_than_is_in_stock_is_refused_and_asked_for(service: FakeService, pool: Pool) -> None:
    """`take` never waits; `require` does, and takes nothing where there is not enough."""
    service.blocks.free_count = 3
    credits = Credits(pool, 2)
    until(lambda: len(credits) == 2)
    with pytest.raises(PoolExhausted, match="3 blocks are needed and 2 are in stock"):
        credits.take(3)
    credits.require(3)
    assert len(credits.take(3)) == 3
    with pytest.raises(PoolExhausted):
        credits.require(1)
    credits.close()


def test_a_recall_takes_what_is_asked_for_and_no_refill_takes_it_back(service: FakeService, pool: Pool) -> None:
    """C19: while the engine does nothing; what was taken stays taken."""
    credits = Credits(pool, 8)
    until(lambda: len(credits) == 8)
    taken = credits.take(1)
    service.blocks.recall(5)
    until(lambda: len(service.blocks.own) == 3)
    assert len(credits) == 2
    lease_count = len(service.blocks.of_kind("lease"))
    assert len(credits.take(1)) == 1
    service.blocks.recall(5)
    pool.blocks.flush()
    assert len(service.blocks.of_kind("lease")) == lease_count
    assert service.blocks.own > {*taken}
    credits.close()


def test_what_the_stock_has_not_is_asked_of_the_engine(service: FakeService, pool: Pool) -> None:
    """`on_recall` is told how many are still wanted."""
    credits = Credits(pool, 2)
    until(lambda: len(credits) == 2)
    wanted: list[int] = []

    def give(block_count: int) -> object:
        wanted.append(block_count)
        return pool.own_blocks.all()[:0]

    pool.blocks.on_recall = give  # type: ignore[assignment]
    service.blocks.recall(5)
    until(lambda: wanted)
    assert wanted == [3]
    credits.close()


def test_an_idle_stock_goes_back(service: FakeService, pool: Pool) -> None:
    """C19: all of it, and the next one to take finds it empty."""
    credits = Credits(pool, 4, idle_s=0.05)
    (lease,) = until(lambda: service.blocks.of_kind("lease"))
    assert lease.want_block_count == 4
    until(lambda: service.blocks.of_kind("release_blocks") and not service.blocks.own)
    assert len(credits) == 0
    credits.close()


def test_a_stock_rests_and_is_refilled_at_once(service: FakeService, pool: Pool) -> None:
    """C19: resting it is no recall. What a refill brings meanwhile goes back too."""
    credits = Credits(pool, 4)
    until(lambda: len(credits) == 4)
    credits.rest()
    until(lambda: not service.blocks.own)
    go_on = threading.Event()

    service.blocks.before["lease"] = wait_for(go_on)
    credits.stock_up()
    credits.rest()
    del service.blocks.before["lease"]
    go_on.set()
    until(lambda: len(service.blocks.of_kind("release_blocks")) == 2)
    pool.blocks.flush()
    assert service.blocks.own == {*pool.own_blocks.all()} == set()
    credits.stock_up()
    until(lambda: len(credits) == 4)
    credits.close()


def test_a_close_gives_everything_back(service: FakeService, pool: Pool) -> None:
    """Also what is leased for it meanwhile; repeating it does nothing."""
    go_on = threading.Event()

    service.blocks.before["lease"] = wait_for(go_on)
    credits = Credits(pool, 4)
    credits.close()
    credits.close()
    go_on.set()
    until(lambda: service.blocks.of_kind("release_blocks"))
    pool.blocks.flush()
    assert service.blocks.own == {*pool.own_blocks.all()} == set()


def test_a_close_meets_a_refill(service: FakeService, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C19: what is put in stock as it is closed goes back too."""
    stock = Credits(pool, 4)
    until(lambda: len(stock) == 4)
    closing = threading.Thread(target=stock.close)
    asks = threading.Event()

    def guard(link: Link) -> threading.Condition:
        if threading.current_thread() is closing:
            asks.set()
        return link._changed

    def join(runs: Sequence[BlockRun]) -> BlockRun:
        closing.start()
        assert asks.wait(DEADLINE_S)
        return BlockRun.join(runs)

    monkeypatch.setattr(Link, "guard", property(guard))
    monkeypatch.setattr(credits, "BlockRun", SimpleNamespace(join=join))
    taken = stock.take(2)
    until(lambda: asks.is_set() and not closing.is_alive())
    pool.blocks.flush()
    assert service.blocks.own == {*taken}


def test_a_stock_that_rested_has_what_is_required(service: FakeService, pool: Pool) -> None:
    """C19: to ask for blocks ends the rest, as to take some does."""
    stock = Credits(pool, 4)
    until(lambda: len(stock) == 4)
    stock.rest()
    stock.require(3)
    assert len(stock.take(3)) == 3
    stock.close()
    until(lambda: len(service.blocks.own) == 3)


def test_the_stock_is_told_to_the_next_process_and_lost_with_the_epoch(service: FakeService) -> None:
    """C17: it is held like any block. A refill that had no answer is made again when one is needed."""
    epochs: list[str] = []
    with connect(service.target, on_epoch=lambda *pair: epochs.append(pair[1])) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        credits = Credits(pool, 4)
        until(lambda: len(credits) == 4)
        service.restart()
        service.wait_until_resumed()
        until(lambda: len(service.blocks.own) == 4)
        assert len(credits.take(1)) == 1
        until(lambda: len(credits) == 4)
        service.new_epoch()
        until(lambda: epochs)
        with pytest.raises(PoolExhausted):
            credits.take(1)
        credits.require(2)
        until(lambda: {*pool.own_blocks.all()} == service.blocks.own)
        credits.close()


def test_a_forgotten_stock_leaves_no_thread(service: FakeService, pool: Pool) -> None:
    """Its blocks are held until the session ends, as all that is forgotten [C1]."""
    before = {*threading.enumerate()}
    made = [Credits(pool, 4, idle_s=0.02)]
    (thread,) = [each for each in {*threading.enumerate()} - before if each.name == "kvharbor-credits"]
    until(lambda: service.blocks.of_kind("lease"))
    made.clear()
    gc.collect()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_stock_of_nothing_is_a_mistake(pool: Pool) -> None:
    """It would never be refilled."""
    with pytest.raises(InvalidField):
        Credits(pool, 0)
