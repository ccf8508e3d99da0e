"""Block calls over the death of a real service's process, and into a new epoch: nobody loses anything by it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.client_worker import LAYOUT, pool_size
from integration.pool_content import classes
from integration.published_chains import SPACE, admit, keys, publish, release
from kvharbor.client import BlockRun, Chain, CommitChain, Credits, PoolExhausted, Unavailable, connect
from service_process import DEADLINE_S, ServiceProcess
from waiting import until


@pytest.mark.slow
def test_what_a_session_holds_outlives_the_process(service: ServiceProcess) -> None:
    """G7, C17: leased blocks, published ones and a shadow; calls made while it is away take effect."""
    with connect(service.target, timeout_s=DEADLINE_S) as one, connect(service.target, timeout_s=DEADLINE_S) as two:
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
