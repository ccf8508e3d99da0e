"""A wait whose grant a release has undone is asked for anew [C18], whatever becomes of that."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fake_chains import SPACE, acquire_numbers, held, polled
from fake_service import FakeService
from fake_stream import table
from kvharbor.client import Acquired, Chain, CommitChain, Pool, PoolExhausted, StaleEpoch, Unavailable
from kvharbor.v1 import blocks_pb2
from waiting import until

KEYS = b"".join(bytes([number]) * 32 for number in range(2))


def cancel(waiting: Acquired) -> None:
    assert waiting.grant is not None
    waiting.grant.cancel()


def asked_anew(
    service: FakeService, pool: Pool, meanwhile: Callable[[Acquired], None], *, holds_again: bool = False
) -> Acquired:
    """Waits for six blocks behind two that a release has undone; `meanwhile` is run when it is asked for anew.

    `holds_again`: another acquire has brought the two back before.
    """
    prompt = Chain(keys=KEYS, namespace=SPACE)
    blocks = pool.blocks.lease(2, 2).blocks
    pool.blocks.commit([CommitChain(blocks=blocks, keys=KEYS, namespace=SPACE)])
    service.blocks.free_count, service.blocks.waits = 0, True
    (waiting,) = pool.blocks.acquire([replace(prompt, table_block_count=8)], wait_s=5)
    (number,) = acquire_numbers(service)
    pool.blocks.release(blocks)
    pool.blocks.flush()
    if holds_again:
        pool.blocks.acquire([prompt])
    service.blocks.before["acquire"] = lambda: meanwhile(waiting)
    service.blocks.own.add((50, 1))
    service.blocks.grant(number, blocks_pb2.AcquireResult(held=table(*blocks), leased=table((50, 1))))
    until(lambda: len(acquire_numbers(service)) == 2 + holds_again)
    return waiting


def test_what_is_asked_for_anew_may_wait_again(service: FakeService, pool: Pool) -> None:
    """The same grant tells of it."""
    waiting = asked_anew(service, pool, lambda _: None)
    pool.blocks.flush()
    assert waiting.grant is not None
    assert waiting.grant.poll() is None
    assert held(pool) == service.blocks.own == set()
    service.blocks.own.add((60, 1))
    service.blocks.grant(acquire_numbers(service)[-1], blocks_pb2.AcquireResult(leased=table((60, 1))))
    assert [*polled(waiting).leased] == [(60, 1)]
    assert held(pool) == service.blocks.own


def test_one_that_is_cancelled_meanwhile_does_not_wait_again(service: FakeService, pool: Pool) -> None:
    """What it is granted on the way goes back, also when the first cancelling has been answered before."""

    def grant_late() -> None:
        if len(service.blocks.of_kind("cancel_wait")) == 2:
            service.blocks.own.add((60, 1))
            service.blocks.grant(acquire_numbers(service)[-1], blocks_pb2.AcquireResult(leased=table((60, 1))))

    service.blocks.before["cancel_wait"] = grant_late

    def cancelled() -> list[int]:
        return [each.request_number for each in service.blocks.of_kind("cancel_wait")]

    waiting = asked_anew(service, pool, cancel)
    until(lambda: cancelled() == acquire_numbers(service))
    assert isinstance(polled(waiting).refusal, PoolExhausted)
    until(lambda: not service.blocks.own)
    pool.blocks.flush()
    assert held(pool) == set()


def test_one_that_is_cancelled_meanwhile_keeps_nothing(service: FakeService, pool: Pool) -> None:
    """Its caller has been told that it gets nothing; there is room now."""

    def meanwhile(waiting: Acquired) -> None:
        service.blocks.free_count = 20
        cancel(waiting)

    waiting = asked_anew(service, pool, meanwhile)
    assert isinstance(polled(waiting).refusal, PoolExhausted)
    # First its answer, then what gives that back.
    for _ in range(2):
        pool.blocks.flush()
    assert held(pool) == service.blocks.own == set()


def test_what_is_asked_for_anew_is_held_by_the_time_it_is_told(service: FakeService, pool: Pool) -> None:
    """Leased blocks as well as those that are there."""

    def meanwhile(_: Acquired) -> None:
        service.blocks.free_count = 20

    got = polled(asked_anew(service, pool, meanwhile))
    assert (len(got.held), len(got.leased)) == (2, 6)
    assert held(pool) == service.blocks.own == {*got.held, *got.leased}


def test_what_is_asked_for_anew_is_not_ended_by_a_release_that_is_made_meanwhile(
    service: FakeService, pool: Pool
) -> None:
    """It stays with the client until it is known what is granted, and goes without that."""

    def meanwhile(_: Acquired) -> None:
        service.blocks.free_count = 20
        pool.blocks.release(pool.own_blocks.all())

    got = polled(asked_anew(service, pool, meanwhile, holds_again=True))
    pool.blocks.flush()
    assert held(pool) == service.blocks.own == {*got.held, *got.leased}


def test_what_is_asked_for_anew_may_be_refused(service: FakeService, pool: Pool) -> None:
    """Nothing is held, and the grant raises why."""
    pool_id = service.held.pool_id

    def leave(_: Acquired) -> None:
        service.held.pool_id = "another"

    waiting = asked_anew(service, pool, leave)
    assert waiting.grant is not None
    with pytest.raises(StaleEpoch):
        until(waiting.grant.poll)
    assert held(pool) == set()
    service.held.pool_id = pool_id


def test_what_is_asked_for_anew_ends_with_the_process(service: FakeService, pool: Pool) -> None:
    """As any acquire without an answer."""
    waiting = asked_anew(service, pool, lambda _: service.restart())
    assert waiting.grant is not None
    with pytest.raises(Unavailable):
        until(waiting.grant.poll)
    pool.blocks.flush()
    assert held(pool) == service.blocks.own == set()
