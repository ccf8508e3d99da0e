"""Block calls against a real service: what one session publishes another holds, and nobody loses by a restart."""

import contextlib
import functools
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.client_worker import BLOCK_TOKENS, LAYOUT, pool_size
from kvharbor.client import (
    Acquired,
    BlockHeld,
    BlockNotHeld,
    BlockRun,
    Chain,
    CommitChain,
    Credits,
    Harbor,
    HarborClosed,
    Namespace,
    Pool,
    PoolExhausted,
    Unavailable,
    connect,
)
from service_process import DEADLINE_S, ServiceProcess
from waiting import until

SPACE = Namespace(scheme="test/sha256")
NAMES = itertools.count()


@pytest.fixture
def harbors(harbor: str) -> Iterator[list[Harbor]]:
    """Two sessions of the shared service."""
    with connect(harbor) as one, connect(harbor) as other:
        yield [one, other]


def both(harbors: list[Harbor], block_count: int) -> list[Pool]:
    """A pool of their own, as each has it."""
    name = f"blocks-{next(NAMES)}"
    return [each.open_pool(name, LAYOUT, pool_size(block_count)) for each in harbors]


def keys(text: str, count: int) -> list[bytes]:
    """Chained keys as an engine makes them."""
    made = [b""]
    for index in range(count):
        made.append(hashlib.sha256(made[-1] + f"{text} {index}".encode()).digest())
    return made[1:]


def admit(pool: Pool, named: list[bytes], table_block_count: int, **how: float) -> Acquired:
    """Acquires a prompt, writes and publishes what is missing of it."""
    chain = Chain(keys=b"".join(named), namespace=SPACE, table_block_count=table_block_count, computes=True)
    (got,) = pool.blocks.acquire([chain], **how)
    publish(pool, named, got)
    return got


def publish(pool: Pool, named: list[bytes], got: Acquired) -> None:
    missing = named[len(got.held) :]
    if got.refusal is None and missing:
        for block, key in zip(got.leased.block_ids[: len(missing)].tolist(), missing, strict=True):
            pool.views.numpy("k", 0)[block] = key[0]
        pool.blocks.commit(
            [
                CommitChain(
                    parent=got.held[-1:], blocks=got.leased[: len(missing)], keys=b"".join(missing), namespace=SPACE
                )
            ]
        )


def release(pool: Pool, got: Acquired) -> None:
    pool.blocks.release(BlockRun.join([got.held, got.leased])[::-1])


def classes(pool: Pool) -> tuple[int, int, int, int]:
    """Free, reserved, active and cached blocks."""
    stats = pool.stats()
    return stats.free_block_count, stats.reserved_block_count, stats.active_block_count, stats.cached_block_count


def test_what_one_session_publishes_another_holds(harbors: list[Harbor]) -> None:
    """Also while the first has it; released by both it is cached, and bytes are those that were written."""
    one, other = both(harbors, 16)
    named = keys("shared", 3)
    first = admit(one, named, 4)
    assert (len(first.held), len(first.leased)) == (0, 4)
    one.blocks.flush()
    second = admit(other, named, 4)
    assert ([*second.held], len(second.leased)) == ([*first.leased[:3]], 1)
    seen = other.views.numpy("k", 0)[second.held.block_ids][:, 0, 0, 0]
    assert seen.tolist() == [key[0] for key in named]
    assert classes(one) == (11, 2, 3, 0)
    for pool, got in ((one, first), (other, second)):
        release(pool, got)
        pool.blocks.flush()
        assert len(pool.own_blocks) == 0
    assert classes(one) == (13, 0, 0, 3)


def test_content_that_is_there_already_is_kept_by_its_session_alone(harbors: list[Harbor]) -> None:
    """Both compute the same at the same time: the second copy is a shadow until it is released."""
    one, other = both(harbors, 16)
    named = keys("twice", 2)
    chain = Chain(keys=b"".join(named), namespace=SPACE, table_block_count=2, computes=True)
    (first,), (second,) = one.blocks.acquire([chain]), other.blocks.acquire([chain])
    assert second.pending is not None
    assert (second.pending.token_count, second.pending.session_id) == (2 * BLOCK_TOKENS, harbors[0].session_id)
    publish(one, named, first)
    one.blocks.flush()
    publish(other, named, second)
    other.blocks.flush()
    assert classes(one)[1:] == (0, 4, 0)
    release(other, second)
    other.blocks.flush()
    assert classes(one)[1:] == (0, 2, 0)
    release(one, first)
    one.blocks.flush()
    assert classes(one) == (14, 0, 0, 2)


def test_tokens_are_found_by_block_calls_and_by_sequences(harbors: list[Harbor]) -> None:
    """One index: what an engine with tables of its own publishes by tokens, a sequence reuses, and the other way."""
    one, other = both(harbors, 16)
    leased = one.blocks.lease(2, 2).blocks
    one.blocks.commit([CommitChain(blocks=leased, tokens=range(32))])
    one.blocks.flush()
    with other.allocate(range(50)) as sequence:
        assert (sequence.cached_tokens, sequence.table[:2].tolist()) == (32, leased.block_ids.tolist())
        sequence.commit(50)
        (got,) = one.blocks.acquire([Chain(tokens=range(48))])
        assert got.held.block_ids.tolist() == sequence.table[:3].tolist()


def test_a_refused_commit_changes_nothing(harbors: list[Harbor]) -> None:
    """A block that the session does not hold; the next chain of the call is taken all the same."""
    one, other = both(harbors, 16)
    theirs, ours = other.blocks.lease(1, 1).blocks, one.blocks.lease(1, 1).blocks
    chains = [
        CommitChain(blocks=blocks, keys=key, namespace=SPACE)
        for blocks, key in zip((theirs, ours), keys("no", 2), strict=True)
    ]
    one.blocks.commit(chains)
    with pytest.raises(BlockNotHeld):
        one.blocks.flush()
    assert classes(one)[1:3] == (1, 1)


def test_wrong_bytes_are_taken_back(harbors: list[Harbor]) -> None:
    """Not under another who holds them: the namespace's version is for that."""
    one, other = both(harbors, 16)
    named = keys("wrong", 2)
    got = admit(one, named, 2)
    one.blocks.flush()
    held = admit(other, named, 2)
    (refusal, _) = one.blocks.invalidate(got.leased).refusals
    assert isinstance(refusal, BlockHeld)
    release(other, held)
    other.blocks.flush()
    taken_back = one.blocks.invalidate(got.leased[:1])
    assert (taken_back.refusals, len(taken_back.leased)) == ((None,), 2)
    assert {*one.own_blocks.all()} == {*taken_back.leased}
    assert classes(one) == (14, 2, 0, 0)
    assert len(admit(other, named, 2).held) == 0


def test_a_version_of_the_weights_separates(harbors: list[Harbor]) -> None:
    """What runs keeps its namespace; what comes next finds nothing of the old version."""
    one, other = both(harbors, 32)
    named = keys("version", 2)
    release(one, admit(one, named, 2))
    with one.allocate(range(32)) as running:
        one.blocks.bump_namespace("v2")
        assert len(admit(one, named, 2).held) == 0
        assert len(admit(other, named, 2).held) == 2
        running.commit(32)
        assert other.lookup(range(32)).present_tokens == 32
        assert one.lookup(range(32)).present_tokens == 0


def test_the_status_page_is_as_the_statistics_are(harbors: list[Harbor]) -> None:
    """Read without a call, also after the other session's changes."""
    one, other = both(harbors, 16)
    page = one.blocks.status
    assert page.epoch == int(harbors[0].epoch, 16)
    assert page.available_block_count == 16
    before = page.revision
    got = admit(other, keys("page", 2), 5)
    other.blocks.flush()
    assert page.revision > before
    assert page.available_block_count == 11
    release(other, got)
    other.blocks.flush()
    stats = one.stats()
    assert page.available_block_count == stats.free_block_count + stats.cached_block_count == 16
    assert page is one.blocks.status


def test_a_status_page_ends_with_its_harbor(harbor: str) -> None:
    """It is unmapped, and reading it is an error and no crash."""
    with connect(harbor) as opened:
        page = opened.open_pool(f"blocks-{next(NAMES)}", LAYOUT, pool_size(4)).blocks.status
    with pytest.raises(HarborClosed):
        _ = page.available_block_count


def test_growth_is_refused_when_there_is_nothing(harbors: list[Harbor]) -> None:
    """And a lease that waits is granted what comes free; one that is cancelled gets nothing."""
    one, other = both(harbors, 8)
    all_there_is = one.blocks.lease(8, 8).blocks
    with pytest.raises(PoolExhausted) as full:
        other.blocks.lease(1, 1, growth=True)
    assert full.value.metadata["availableBlockCount"] == "0"
    waiting, given_up = other.blocks.lease(2, 2, wait_s=DEADLINE_S), other.blocks.lease(2, 2, wait_s=DEADLINE_S)
    assert waiting.grant is not None
    assert given_up.grant is not None
    given_up.grant.cancel()
    one.blocks.release(all_there_is[:4])
    got = until(waiting.grant.poll)
    assert got is not None
    assert len(got.leased) == 2
    # Where the release was faster than the cancel, what comes of it goes back by itself: only the service can tell
    # that nothing more is under way.
    until(lambda: classes(one)[:2] == (2, 6) and {*other.own_blocks.all()} == {*got.leased})


def _is_full(credits: Credits) -> bool:
    return len(credits) == 32


def test_idle_credits_come_back_within_a_tenth_of_a_second(harbors: list[Harbor]) -> None:
    """C19: of a recall, while their owner makes no call; the quickest of some tries, as the machine may be busy."""
    one, other = both(harbors, 32)
    took_s: list[float] = []
    while not took_s or (min(took_s) > 0.1 and len(took_s) < 5):
        credits = Credits(one, 32, idle_s=3600)
        until(functools.partial(_is_full, credits))
        began_at = time.perf_counter()
        waiting = other.blocks.lease(8, 8, wait_s=DEADLINE_S)
        blocks = waiting.blocks if waiting.grant is None else until(waiting.grant.poll).leased  # type: ignore[union-attr]
        took_s.append(time.perf_counter() - began_at)
        assert len(blocks) == 8
        assert len(credits) == 24
        credits.close()
        other.blocks.release(blocks)
        one.blocks.flush()
        other.blocks.flush()
    assert min(took_s) <= 0.1


@pytest.mark.slow
def test_two_engines_on_a_tight_pool_both_go_on(harbors: list[Harbor]) -> None:
    """A prompt needs most of the pool, and each engine keeps credits: neither stalls, nor starves the other."""
    pools = both(harbors, 20)
    round_count = 40

    def work(number: int) -> None:
        pool = pools[number]
        credits = Credits(pool, 6, idle_s=0.05)
        for index in range(round_count):
            (got,) = pool.blocks.acquire(
                [Chain(keys=b"".join(keys(f"{number} {index}", 8)), namespace=SPACE, table_block_count=10)],
                wait_s=DEADLINE_S,
            )
            if got.grant is not None:
                polled = until(got.grant.poll)
                assert polled is not None
                got = polled
            assert got.refusal is None, got.refusal
            assert len(got.held) + len(got.leased) == 10
            publish(pool, keys(f"{number} {index}", 8), got)
            with contextlib.suppress(PoolExhausted):
                pool.blocks.release(credits.take(2))
            release(pool, got)
        credits.close()
        until(lambda: not len(pool.own_blocks))

    with ThreadPoolExecutor(2) as threads:
        working = [threads.submit(work, number) for number in range(2)]
        for each in working:
            each.result(3 * DEADLINE_S)
    assert classes(pools[0])[1:3] == (0, 0)


def test_a_fork_has_no_part_in_the_stream(harbor: str) -> None:
    """C7: the child's calls say so at once, and the parent's stream goes on."""
    with connect(harbor) as opened:
        pool = opened.open_pool(f"blocks-{next(NAMES)}", LAYOUT, pool_size(8))
        leased = pool.blocks.lease(2, 2).blocks
        credits = Credits(pool, 1)
        sending, forked = threading.Event(), threading.Event()

        def send() -> None:
            """Has the lock of what is sent, as its thread may have at any moment."""
            with pool.link.stream._outbox.paused():
                sending.set()
                forked.wait(DEADLINE_S)

        sender = threading.Thread(target=send)
        sender.start()
        assert sending.wait(DEADLINE_S)
        child = os.fork()
        if not child:
            status = 1
            try:
                pool.blocks.release(leased)
            except HarborClosed:
                credits.close()
                opened.close()
                status = 0
            os._exit(status)
        forked.set()
        sender.join(DEADLINE_S)
        assert os.waitpid(child, 0)[1] == 0
        credits.close()
        pool.blocks.release(leased)
        pool.blocks.flush()
        until(lambda: not len(pool.own_blocks))


# The death of the process


@pytest.mark.slow
def test_what_a_session_holds_outlives_the_process(service: ServiceProcess) -> None:
    """G7, C17: leased blocks, published ones and a shadow; calls made while it is away take effect."""
    with connect(service.target) as one, connect(service.target) as two:
        pool, other = (each.open_pool("p", LAYOUT, pool_size(32)) for each in (one, two))
        named = keys("kept", 3)
        chain = Chain(keys=b"".join(named), namespace=SPACE, table_block_count=5)
        (got,), (twin,) = pool.blocks.acquire([chain]), other.blocks.acquire([chain])
        publish(pool, named, got)
        pool.blocks.flush()
        publish(other, named, twin)
        other.blocks.flush()
        before = classes(pool)
        service.kill_child()
        late = keys("kept", 4)
        pool.blocks.commit([CommitChain(parent=got.leased[2:3], blocks=got.leased[3:4], keys=late[3], namespace=SPACE)])
        other.blocks.release(twin.leased[3:4])
        for each in (pool, other):
            each.blocks.flush()
        free, reserved, active, cached = before
        assert classes(pool) == (free + 1, reserved - 2, active + 1, cached)
        (again,) = other.blocks.acquire([Chain(keys=b"".join(late), namespace=SPACE)])
        assert [*again.held] == [*got.leased[:4]]
        for each, run in ((pool, got.leased), (other, BlockRun.join([twin.leased, again.held]))):
            each.blocks.release(run)
            each.blocks.flush()
        assert classes(pool) == (28, 0, 0, 4)


@pytest.mark.slow
def test_engines_at_work_go_on_through_deaths_of_the_process(service: ServiceProcess) -> None:
    """Two sessions admit, publish and release all the time while it dies six times; at the end nothing is left over."""
    stop = threading.Event()

    def work(number: int) -> int:
        rounds = 0
        with connect(service.target, timeout_s=DEADLINE_S) as opened:
            pool = opened.open_pool("p", LAYOUT, pool_size(40))
            while not stop.is_set():
                named = keys(str((rounds + number) % 5), 6)
                try:
                    got = admit(pool, named, 8, wait_s=0)
                except Unavailable:
                    continue
                if got.refusal is None:
                    pool.blocks.flush()
                    seen = pool.views.numpy("k", 0)[BlockRun.join([got.held, got.leased]).block_ids[:6], 0, 0, 0]
                    assert seen.tolist() == [key[0] for key in named]
                    release(pool, got)
                    rounds += 1
            pool.blocks.flush()
            assert len(pool.own_blocks) == 0
        return rounds

    with connect(service.target) as observer, ThreadPoolExecutor(2) as threads:
        pool = observer.open_pool("p", LAYOUT, pool_size(40))
        working = [threads.submit(work, number) for number in range(2)]
        try:
            for _ in range(6):
                before = pool.blocks.status.revision
                until(lambda seen=before: pool.blocks.status.revision > seen + 20)  # type: ignore[misc]
                service.restart_child()
        finally:
            stop.set()
        rounds = [each.result(3 * DEADLINE_S) for each in working]
        assert min(rounds) > 0
        assert classes(pool)[1:3] == (0, 0)


@pytest.mark.slow
def test_a_new_epoch_is_begun_with_nothing(service: ServiceProcess, start_fresh: object) -> None:
    """C17: the whole service is replaced; the same objects go on in the new one."""
    epochs: list[str] = []
    with connect(service.target, on_epoch=lambda *pair: epochs.append(pair[1])) as opened:
        pool = opened.open_pool("p", LAYOUT, pool_size(16))
        credits = Credits(pool, 4)
        admit(pool, keys("old", 2), 4)
        old_page = pool.blocks.status
        service.kill()
        start_fresh(socket=service.socket)  # type: ignore[operator]
        until(lambda: epochs)
        with pytest.raises(PoolExhausted):
            until(lambda: credits.take(1) and None)
        fresh = admit(pool, keys("old", 2), 4)
        assert len(fresh.held) == 0
        assert pool.blocks.status is not old_page
        release(pool, fresh)
        credits.close()
        until(lambda: not len(pool.own_blocks))
        assert classes(pool)[1:3] == (0, 0)
