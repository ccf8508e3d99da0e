"""Block calls of the client and its stream. The service is a fake that dies at exactly the moment a test wants."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fake_service import DEADLINE_S, FakeService
from fake_stream import blocks_of, table
from integration.client_worker import LAYOUT
from kvharbor.client import (
    Acquired,
    BlockNotHeld,
    BlockRun,
    Chain,
    CommitChain,
    DeadlineExceeded,
    EpochEnded,
    Harbor,
    HarborClosed,
    HarborError,
    InvalidField,
    MessageTooLarge,
    Namespace,
    Pool,
    PoolExhausted,
    ServiceAway,
    ServiceUnreachable,
    StateRefused,
    channel,
    connect,
)
from kvharbor.v1 import blocks_pb2, errors_pb2, types_pb2
from kvharbor.v1 import stream_service_pb2 as stream_pb2
from waiting import until

SPACE = Namespace(scheme="test/sha256")
KEYS = [bytes([number]) * 32 for number in range(8)]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    """The fake, with its process running."""
    fake = FakeService(tmp_path, LAYOUT, block_count=64)
    yield fake
    fake.close()


@pytest.fixture
def harbor(service: FakeService) -> Iterator[Harbor]:
    """A harbor of the fake."""
    with connect(service.target) as opened:
        yield opened


@pytest.fixture
def pool(harbor: Harbor) -> Pool:
    """Its pool."""
    return harbor.open_pool("p", LAYOUT)


def chain(key_count: int, table_block_count: int = 0, **fields: Any) -> Chain:
    return Chain(keys=b"".join(KEYS[:key_count]), namespace=SPACE, table_block_count=table_block_count, **fields)


def published(pool: Pool, key_count: int) -> BlockRun:
    """Blocks that the session has leased and committed under the first keys."""
    leased = pool.blocks.lease(key_count, key_count).blocks
    pool.blocks.commit([CommitChain(blocks=leased, keys=b"".join(KEYS[:key_count]), namespace=SPACE)])
    return leased


def held(pool: Pool) -> set[tuple[int, int]]:
    return {*pool.own_blocks.all()}


def once(hooks: dict[str, Callable[[], None]], kind: str, run: Callable[[], object]) -> None:
    """Has something run at the next request of a kind, and not again."""

    def hook() -> None:
        del hooks[kind]
        run()

    hooks[kind] = hook


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
    service.blocks.before["commit_blocks"] = lambda: _wait(go_on)
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


def test_what_an_invalidate_takes_back_too_late_is_given_back(service: FakeService) -> None:
    """C17: its caller has nothing of it, so nothing of it is held; the block before stays."""
    go_on = threading.Event()
    once(service.blocks.before, "invalidate_blocks", lambda: _wait(go_on))
    with connect(service.target) as opened:
        pool = opened.open_pool("p", LAYOUT)
        blocks = published(pool, 2)
        with pytest.raises(DeadlineExceeded):
            pool.blocks.invalidate(blocks[1:], timeout_s=0.1)
        go_on.set()
        until(lambda: service.blocks.of_kind("release_blocks"))
        pool.blocks.flush()
        assert held(pool) == service.blocks.own == {*blocks[:1]}


# A release must not end what was granted meanwhile


def test_a_release_does_not_end_what_an_unanswered_acquire_gives(service: FakeService, pool: Pool) -> None:
    """C18: it is sent after the answer, and without what that has given; all behind it waits with it."""
    blocks = published(pool, 2)
    other = pool.blocks.lease(1, 1).blocks
    asked, go_on = threading.Event(), threading.Event()
    once(service.blocks.after, "acquire", halt(asked, go_on))
    with ThreadPoolExecutor(1) as thread:
        acquiring = thread.submit(pool.blocks.acquire, [chain(2)])
        _wait(asked)
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
    _grant(service, waiting, granted)
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
    _wait(asked)
    _grant(service, waiting, blocks_pb2.AcquireResult(held=table(*blocks), leased=table((50, 1))))
    until(lambda: len(pool.link.stream.unanswered.all()) == 3)
    go_on.set()
    got = polled(waiting)
    pool.blocks.flush()
    assert [*got.held] == [*blocks]
    assert held(pool) == service.blocks.own == {*blocks, *got.leased}


# Waits for room


def polled(waiting: Acquired) -> Acquired:
    assert waiting.grant is not None
    got = until(waiting.grant.poll)
    assert got is not None
    return got


def _grant(service: FakeService, waiting: Acquired, result: blocks_pb2.AcquireResult) -> None:
    number = next(each.number for each in service.blocks.requests if each.WhichOneof("call") in ("acquire",))
    granted = blocks_pb2.Granted(result=result)
    service.blocks.push(stream_pb2.ConverseResponse(number=number, granted=granted))


def test_a_grant_is_polled(service: FakeService, pool: Pool) -> None:
    """None while it waits; what comes is held."""
    service.blocks.free_count, service.blocks.waits = 0, True
    (waiting,) = pool.blocks.acquire([chain(0, 1)], wait_s=5)
    assert waiting.waiting
    assert waiting.grant is not None
    assert waiting.grant.poll() is None
    service.blocks.own.add((50, 1))
    _grant(service, waiting, blocks_pb2.AcquireResult(leased=table((50, 1))))
    got = polled(waiting)
    assert [*got.leased] == [(50, 1)]
    assert held(pool) == {(50, 1)}


def test_a_wait_that_is_over_is_a_refusal(service: FakeService, pool: Pool) -> None:
    """Nothing is held."""
    service.blocks.free_count, service.blocks.waits = 0, True
    (waiting,) = pool.blocks.acquire([chain(0, 1)], wait_s=5)
    assert waiting.grant is not None
    status = types_pb2.ItemStatus(code=8, reason=errors_pb2.ERROR_REASON_POOL_EXHAUSTED)
    _grant(service, waiting, blocks_pb2.AcquireResult(status=status))
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
        lambda: _grant(service, waiting, blocks_pb2.AcquireResult(leased=table((50, 1)))),
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
    with connect(service.target, timeout_s=0.2) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        blocks = published(pool, 2)
        pool.blocks.flush()
        service.blocks.content[KEYS[2]] = (40, 3)
        go_on = threading.Event()
        once(service.blocks.before, "acquire", lambda: _wait(go_on))
        with pytest.raises(DeadlineExceeded):
            pool.blocks.acquire([chain(3, 5)])
        go_on.set()
        until(lambda: service.blocks.of_kind("release_blocks"))
        pool.blocks.flush(DEADLINE_S)
        assert held(pool) == service.blocks.own == {*blocks}


def test_a_wait_that_begins_too_late_is_ended(service: FakeService, pool: Pool) -> None:
    """Its caller has no grant to cancel: the service must not keep it in line, and what it gives goes back."""
    service.blocks.waits, service.blocks.free_count = True, 0
    go_on = threading.Event()
    once(service.blocks.before, "acquire", lambda: _wait(go_on))
    with pytest.raises(DeadlineExceeded):
        pool.blocks.acquire([chain(1, 1)], wait_s=DEADLINE_S, timeout_s=0.1)
    go_on.set()
    (cancelled,) = until(lambda: service.blocks.of_kind("cancel_wait"))
    assert cancelled.request_number == service.blocks.requests[0].number
    pool.blocks.flush()
    assert held(pool) == set()


def test_a_flush_out_of_time_says_so(service: FakeService, pool: Pool) -> None:
    """What was sent still takes effect."""
    leased = pool.blocks.lease(1, 1).blocks
    go_on = threading.Event()
    once(service.blocks.before, "release_blocks", lambda: _wait(go_on))
    pool.blocks.release(leased)
    with pytest.raises(DeadlineExceeded):
        pool.blocks.flush(timeout_s=0.05)
    go_on.set()
    pool.blocks.flush()
    assert held(pool) == service.blocks.own == set()


# The death of the process


def test_what_is_held_is_told_to_the_next_process(service: FakeService, pool: Pool) -> None:
    """C17: as of the last answer; what is unanswered is sent again, in order, and an acquire fails."""
    kept, given, written = (pool.blocks.lease(1, 1).blocks for _ in range(3))
    asked, go_on = threading.Event(), threading.Event()
    service.blocks.before["commit_blocks"] = halt(asked, go_on)
    pool.blocks.commit([CommitChain(blocks=written, keys=KEYS[0], namespace=SPACE)])
    pool.blocks.release(given)
    _wait(asked)
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


# Epochs, versions, ends


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
        _wait(asked)
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


# Recalls


def test_a_recall_is_answered_in_the_threads_of_the_harbor(service: FakeService, pool: Pool) -> None:
    """What the engine gives is released at once, although it makes no call."""
    leased = pool.blocks.lease(4, 4).blocks
    recalled: list[int] = []

    def give(block_count: int) -> BlockRun:
        recalled.append(block_count)
        return leased[:block_count]

    pool.blocks.on_recall = give
    recall = blocks_pb2.Recall(pool_id=pool.id, block_count=3)
    service.blocks.push(stream_pb2.ConverseResponse(recall=recall))
    until(lambda: len(service.blocks.own) == 1)
    assert recalled == [3]
    pool.blocks.flush()
    assert held(pool) == {*leased[3:]}


def halt(asked: threading.Event, go_on: threading.Event) -> Callable[[], None]:
    """Returns what says that it is there, and then waits."""

    def halted() -> None:
        asked.set()
        _wait(go_on)

    return halted


def test_a_recall_finds_its_way_after_a_restart(service: FakeService, pool: Pool) -> None:
    """The stream is opened anew by itself, although the engine makes no call."""
    leased = pool.blocks.lease(1, 1).blocks
    pool.blocks.on_recall = lambda _: leased
    service.restart()
    service.wait_until_resumed()
    assert service.blocks.opened.wait(DEADLINE_S)
    recall = blocks_pb2.Recall(pool_id=pool.id, block_count=1)
    service.blocks.push(stream_pb2.ConverseResponse(recall=recall))
    until(lambda: not service.blocks.own)


def test_what_a_callback_raises_does_not_end_the_stream(service: FakeService, pool: Pool) -> None:
    """It is the engine's own mistake, and is logged."""
    recalled = threading.Event()

    def broken(_: int) -> BlockRun:
        recalled.set()
        raise ValueError("a mistake")

    pool.blocks.on_recall = broken
    pool.blocks.lease(1, 1)
    recall = blocks_pb2.Recall(pool_id=pool.id, block_count=1)
    service.blocks.push(stream_pb2.ConverseResponse(recall=recall))
    _wait(recalled)
    assert len(pool.blocks.lease(1, 1).blocks) == 1


def test_a_callback_cannot_wait_for_an_answer(service: FakeService, pool: Pool) -> None:
    """It is called in the thread that would bring it."""
    mistakes: list[BaseException] = []

    def waiting(_: int) -> BlockRun:
        for call in (lambda: pool.blocks.lease(1, 1), pool.blocks.flush):
            try:
                call()
            except InvalidField as mistake:
                mistakes.append(mistake)
        return BlockRun.of([])

    pool.blocks.on_recall = waiting
    pool.blocks.lease(1, 1)
    recall = blocks_pb2.Recall(pool_id=pool.id, block_count=1)
    service.blocks.push(stream_pb2.ConverseResponse(recall=recall))
    until(lambda: len(mistakes) == 2)


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


def test_an_acquire_that_has_not_left_is_made_in_the_next_process(service: FakeService, pool: Pool) -> None:
    """It stood behind another: nothing can have come of it, so its caller need not know."""
    go_on, asked = threading.Event(), threading.Event()
    leased = pool.blocks.lease(1, 1).blocks
    once(service.blocks.before, "acquire", halt(asked, go_on))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pool.blocks.acquire, [chain(0, 1)])
        _wait(asked)
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


def _wait(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)
