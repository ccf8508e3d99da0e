"""The service's process is killed under clients that are at work: they go on, and nothing is lost or wrong."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from integration.client_kinds import Connect
from integration.client_worker import LAYOUT, WorkerProcess, pool_size, read, stamp
from kvharbor.client import Pool, connect
from kvharbor.client import Sequence as PoolSequence
from service_process import DEADLINE_S, ServiceProcess
from waiting import until

pytestmark = pytest.mark.slow


def test_a_sequence_goes_on_through_the_death_of_the_process(open_harbor: Connect, service: ServiceProcess) -> None:
    """G7, C11: commits and releases while it is away, then everything as if it had been there all the time."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT, pool_size(8))
    held, other = pool.allocate(range(20), reserve_tokens=28), pool.allocate(range(100, 116))
    stamp(pool, held, 0, range(20))
    assert held.commit(20).committed_tokens == 16
    with service.away():
        stamp(pool, held, 20, range(20, 33))
        assert held.commit(33, list(range(20, 33))).pending
        other.release()
    service.wait_for("ready", 2)
    assert pool.lookup(range(48)).present_tokens == 32
    assert held.commit(33).committed_tokens == 32
    stats = pool.stats()
    assert (stats.sequence_count, stats.active_block_count, stats.reserved_block_count) == (1, 2, 1)
    held.release()
    with pool.allocate(range(48)) as reader:
        assert reader.cached_tokens == 32
        assert read(pool, reader, 0, 32) == list(range(32))


def test_calls_wait_for_the_next_process(open_harbor: Connect, service: ServiceProcess) -> None:
    """Allocate, extend, fork and hand-off are made while nobody is there, and answered by who comes."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT, pool_size(16))
    held = pool.allocate(range(16))
    held.commit(16)
    service.kill_child()
    held.extend(16)
    assert len(held.table) == 2
    service.restart_child()
    (child,) = held.fork(1)
    service.restart_child()
    adopted = pool.adopt(held.handoff(16))
    service.restart_child()
    with pool.allocate(range(17)) as again:
        assert again.cached_tokens == 16
    assert pool.stats().sequence_count == 2
    for sequence in (child, adopted):
        sequence.release()
    assert pool.stats().sequence_count == 0


def test_an_idle_worker_keeps_what_it_holds(service: ServiceProcess) -> None:
    """Nobody calls: the harbor comes back by itself, and the service waits no more for it."""
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", LAYOUT, pool_size(8))
        held = pool.allocate(range(128))
        service.restart_child()
        with connect(service.target) as other:
            seen = other.open_pool("p", LAYOUT)
            # It is told what is held a little after its side socket is there: quarantined until then.
            until(lambda: seen.stats().reserved_block_count == 8)
        held.release()


def test_threads_at_work_notice_nothing(service: ServiceProcess) -> None:
    """Four threads write, commit, read back, fork and release over a small pool while the process dies six times."""
    stop = threading.Event()
    with connect(service.target, timeout_s=DEADLINE_S) as harbor:
        pool = harbor.open_pool("p", LAYOUT, pool_size(40))
        with ThreadPoolExecutor(4) as threads:
            works = [threads.submit(_work, pool, number, stop) for number in range(4)]
            try:
                for _ in range(6):
                    service.restart_child()
                    _until_served(pool, works)
            finally:
                stop.set()
            rounds = [work.result(DEADLINE_S) for work in works]
        assert min(rounds) > 0
        stats = pool.stats()
        assert (stats.sequence_count, stats.reserved_block_count, stats.active_block_count) == (0, 0, 0)


def _until_served(pool: Pool, works: list["Future[int]"]) -> None:
    before = pool.stats().counters.allocate_count
    deadline_s = time.monotonic() + DEADLINE_S
    while pool.stats().counters.allocate_count < before + 4:
        for work in works:
            assert not work.done() or work.result()
        assert time.monotonic() < deadline_s


def _work(pool: Pool, number: int, stop: threading.Event) -> int:
    rounds = 0
    while not stop.is_set():
        first = 1000 * number + 100 * (rounds % 3)
        tokens = list(range(first, first + 40))
        with pool.allocate(tokens, wait_s=DEADLINE_S) as held:
            _write_and_check(pool, held, tokens)
            with held.fork(1, reserve_tokens=8)[0] as child:
                _grow(pool, child, tokens, number)
            _grow(pool, held, tokens, number + 10)
        rounds += 1
    return rounds


def _write_and_check(pool: Pool, held: PoolSequence, tokens: list[int]) -> None:
    cached = held.cached_tokens
    assert not cached or read(pool, held, 0, cached) == tokens[:cached]
    stamp(pool, held, cached, tokens[cached:])
    held.commit(len(tokens))
    held.switch_shadows()
    assert read(pool, held, 0, len(tokens)) == tokens


def _grow(pool: Pool, held: PoolSequence, tokens: list[int], value: int) -> None:
    new = [value] * 8
    if held.capacity_tokens < len(tokens) + len(new):
        held.extend(len(new))
    stamp(pool, held, len(tokens), new)
    held.commit(len(tokens) + len(new), new)
    held.switch_shadows()
    assert read(pool, held, 0, len(tokens) + 8) == tokens + new


def test_what_died_while_the_process_was_away_is_found_dead(service: ServiceProcess) -> None:
    """G6 and G7 together: the dead worker's blocks come back, the living one's stay."""
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", LAYOUT, pool_size(8))
        worker = WorkerProcess(service.target, "p", block_count=8)
        worker.allocate("x", range(64))
        held = pool.allocate(range(1000, 1032))
        service.kill_child()
        worker.kill()
        with pool.allocate(range(2000, 2096), wait_s=DEADLINE_S) as rest:
            assert len(rest.table) == 6
        held.release()


def test_a_warm_prefix_goes_on_being_filled(open_harbor: Connect, service: ServiceProcess) -> None:
    """The sequence that fills a pin is told of with the pin's name: what it commits later is pinned."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT, pool_size(16))
    warm = pool.warmup(range(48), "system")
    warm.sequence.commit(20)
    service.restart_child()
    warm.sequence.commit(48)
    warm.sequence.release()
    assert pool.lookup(range(48)).present_tokens == 48
    stats = pool.stats()
    assert (stats.warm_block_count, stats.pin_count, stats.sequence_count) == (3, 1, 0)
    pool.unwarm("system")


def test_calls_that_are_not_sent_twice_to_a_process_go_to_the_next(
    open_harbor: Connect, service: ServiceProcess
) -> None:
    """C8: a warm-up under way when the process dies is made by the next, and nothing is left of the first."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT, pool_size(16))
    for _ in range(2):
        service.kill_child()
        sequence = pool.warmup(range(16), "w", ttl_s=600).sequence
        if sequence is not None:
            sequence.commit(16)
            sequence.release()
        assert (pool.stats().sequence_count, pool.stats().warm_block_count) == (0, 1)
        service.restart_child()
        pool.unwarm("w")


def test_a_session_that_accepts_warm_tasks_still_does(service: ServiceProcess) -> None:
    """It says so again, and waits through the process's absence."""
    with connect(service.target, accepts_warm_tasks=True) as engine, connect(service.target) as operator:
        engine.open_pool("p", LAYOUT, pool_size(16))
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(engine.next_warm_task, DEADLINE_S)
            service.restart_child()
            operator.find_pool("p").warmup_by_engine(range(32), "w")
            task = waiting.result(DEADLINE_S)
        assert task is not None
        task.sequence.release()
        operator.find_pool("p").unwarm("w")
