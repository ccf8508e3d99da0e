"""Block calls of the client: what they hold, what they refuse, and in which order they are sent."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fake_chains import KEYS, SPACE, chain, held, published
from fake_process import refused_item
from fake_service import FakeService
from kvharbor.client import (
    BlockNotHeld,
    BlockRun,
    Chain,
    CommitChain,
    HarborError,
    InvalidField,
    MessageTooLarge,
    Pool,
    PoolExhausted,
    StateRefused,
    channel,
)
from kvharbor.v1 import blocks_pb2, types_pb2
from moments import wait_for
from waiting import until


def test_an_acquire_holds_what_is_there_and_leases_the_rest(service: FakeService, pool: Pool) -> None:
    """C17: what the answer gives is held by the session, here and there."""
    first = published(pool, 2)
    (got,) = pool.blocks.acquire([chain(3, 4)])
    assert [*got.held] == [*first]
    assert len(got.leased) == 2
    assert held(pool) == service.blocks.own == {*first, *got.leased}
    (asked,) = service.blocks.of_kind("acquire")
    assert (asked.chains[0].namespace.scheme, asked.chains[0].computes) == ("test/sha256", False)


def test_a_chain_that_does_not_fit_is_refused_alone(service: FakeService, pool: Pool) -> None:
    """The results are in the order of the chains."""
    service.blocks.free_count = 3
    fits, refused = pool.blocks.acquire([chain(1, 2), chain(1, 9)])
    assert len(fits.leased) == 2
    assert isinstance(refused.refusal, PoolExhausted)
    assert (len(refused.held), len(refused.leased), refused.waiting, refused.grant) == (0, 0, False, None)


def test_a_lease_is_refused_as_a_whole(service: FakeService, pool: Pool) -> None:
    """PoolExhausted below `least`; what is there above it."""
    service.blocks.free_count = 3
    with pytest.raises(PoolExhausted):
        pool.blocks.lease(4, 4)
    assert len(pool.blocks.lease(2, 9).blocks) == 3


def test_commits_and_releases_are_sent_in_order_and_not_awaited(service: FakeService, pool: Pool) -> None:
    """C17: they return while the service is still at work on what was sent before."""
    leased = pool.blocks.lease(3, 3).blocks
    go_on = threading.Event()
    service.blocks.before["commit_blocks"] = wait_for(go_on)
    pool.blocks.commit([CommitChain(blocks=leased[:1], keys=KEYS[0], namespace=SPACE)])
    pool.blocks.commit([CommitChain(blocks=leased[1:2], parent=leased[:1], keys=KEYS[1], namespace=SPACE)])
    pool.blocks.release(leased[2:])
    assert held(pool) == {*leased}
    go_on.set()
    pool.blocks.flush()
    assert held(pool) == service.blocks.own == {*leased[:2]}
    kinds = [request.WhichOneof("call") for request in service.blocks.requests]
    assert kinds == ["lease", "commit_blocks", "commit_blocks", "release_blocks"]
    numbers = [request.number for request in service.blocks.requests]
    assert numbers == sorted({*numbers})


def test_what_is_abandoned_is_told_in_order_and_not_awaited(service: FakeService, pool: Pool) -> None:
    """C17: as it was acquired."""
    go_on = threading.Event()
    asked = chain(1, 2)
    pool.blocks.acquire([asked])
    service.blocks.before["abandon"] = wait_for(go_on)
    pool.blocks.abandon([asked])
    pool.blocks.abandon([chain(3, 4), asked])
    assert len(service.blocks.of_kind("abandon")) <= 1
    go_on.set()
    pool.blocks.flush()
    assert [[each.keys for each in call.chains] for call in service.blocks.of_kind("abandon")] == [
        [asked.keys],
        [chain(3, 4).keys, asked.keys],
    ]
    assert {call.pool_id for call in service.blocks.of_kind("abandon")} == {service.pool_id}


def test_what_is_wrongly_abandoned_is_raised_by_the_next_flush(
    service: FakeService, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service has refused it as no chain."""
    refused = blocks_pb2.AbandonResponse(statuses=[types_pb2.ItemStatus(), refused_item("INVALID_FIELD", 3)])
    monkeypatch.setattr(service.blocks, "_abandon", lambda _: refused)
    pool.blocks.abandon([chain(1, 1), chain(2, 1)])
    with pytest.raises(InvalidField):
        pool.blocks.flush()
    pool.blocks.flush()


def test_a_refusal_that_nobody_waits_for_is_raised_by_the_next_flush(pool: Pool) -> None:
    """Once, and with its reason."""
    strange = BlockRun.of([(60, 7)])
    pool.blocks.commit([CommitChain(blocks=strange, keys=KEYS[0], namespace=SPACE)])
    with pytest.raises(BlockNotHeld):
        pool.blocks.flush()
    pool.blocks.flush()


def test_a_refusal_goes_to_who_asked_for_it(pool: Pool) -> None:
    """`on_refusal` may make calls that are not awaited."""
    refusals: list[HarborError] = []

    def refused(error: HarborError) -> None:
        pool.blocks.release(BlockRun.of([]))
        refusals.append(error)

    pool.blocks.on_refusal = refused
    pool.blocks.commit([CommitChain(blocks=BlockRun.of([(60, 7)]), keys=KEYS[0], namespace=SPACE)])
    pool.blocks.flush()
    until(lambda: refusals)
    assert [type(error) for error in refusals] == [BlockNotHeld]


@pytest.mark.parametrize(
    "mistake",
    [
        lambda blocks: blocks.release(BlockRun.of([(64, 1)])),
        lambda blocks: blocks.acquire([Chain(keys=b"short")]),
        lambda blocks: blocks.acquire([Chain(tokens=[-1])]),
        lambda blocks: blocks.abandon([Chain(tokens=[-1])]),
        lambda blocks: blocks.lease(1, 2**40),
        lambda blocks: blocks.lease(1, 1, wait_s=-1),
    ],
)
def test_a_mistake_is_found_before_anything_is_sent(
    service: FakeService, pool: Pool, mistake: Callable[[Any], object]
) -> None:
    """Typed, and the stream goes on."""
    with pytest.raises(InvalidField):
        mistake(pool.blocks)
    assert service.blocks.requests == []


def test_a_message_that_is_too_large_does_not_end_the_stream(
    service: FakeService, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport would end it for that, with all that is under way."""
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(MessageTooLarge):
        pool.blocks.acquire([chain(8)] * 10)
    assert service.blocks.requests == []


def test_an_invalidated_block_is_a_leased_one_of_another_generation(service: FakeService, pool: Pool) -> None:
    """The set has it as it is now."""
    blocks = published(pool, 2)
    taken_back = pool.blocks.invalidate(blocks[1:])
    (named,) = blocks[1:]
    assert ([*taken_back.leased], [*taken_back.before], taken_back.refusals) == ([(named[0], 2)], [named], (None,))
    assert held(pool) == service.blocks.own == {*blocks[:1], (named[0], 2)}
    pool.blocks.release(taken_back.before)
    pool.blocks.flush()
    assert held(pool) == service.blocks.own == {*blocks[:1], (named[0], 2)}


def test_a_bumped_version_is_named_in_every_call(service: FakeService, pool: Pool) -> None:
    """Also to the next process, after the sequences, and in a new epoch's first call."""
    assert pool.blocks.bump_namespace("v2") == "v2"
    pool.blocks.acquire([Chain(tokens=range(16))])
    (asked,) = service.blocks.of_kind("acquire")
    assert asked.chains[0].namespace.version == "v2"
    sequence = pool.allocate(range(16))
    assert service.calls["Allocate"][0].namespace.version == "v2"
    service.restart()
    service.wait_until_resumed()
    assert service.blocks.versions == ["v2", "v2"]
    with_sequences, with_version = service.calls["Resume"]
    assert (with_sequences.HasField("version"), len(with_version.sequences)) == (False, 0)
    sequence.release()
    assert pool.blocks.bump_namespace() == pool.blocks.version == "fresh"


def test_a_service_that_knows_no_stream_says_so(service: FakeService, pool: Pool) -> None:
    """Each call is refused with it, and none waits until its time is over."""
    service.refuse_stream = True
    with pytest.raises(StateRefused, match="UNIMPLEMENTED"):
        pool.blocks.lease(1, 1)
    pool.blocks.commit([])
    with pytest.raises(StateRefused, match="UNIMPLEMENTED"):
        pool.blocks.flush()
    service.refuse_stream = False
    assert len(pool.blocks.lease(1, 1).blocks) == 1
