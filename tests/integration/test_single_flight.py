"""Single flight between real processes: what one computes the others wait for, while it makes sense [W1] to [W6]."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from integration.client_kinds import KINDS, connector
from integration.client_worker import LAYOUT, Worker, WorkerProcess, pool_size
from integration.crowd_worker import Crowd, PoliteCrowd, Served, SmallCrowd
from kvharbor.client import PoolStats, connect
from service_process import ServiceProcess
from waiting import until

pytestmark = pytest.mark.slow

BLOCK_COUNT = 2_000
PREFIX = range(1, 4097)
PREFIX_BLOCKS = 4096 // LAYOUT.block_tokens
LONG_S = 30.0
Start = Callable[[Any], WorkerProcess]


@pytest.fixture
def start(shared_service: ServiceProcess, pool_name: str) -> Iterator[Start]:
    """Starts processes on the test's pool; ends them with the test."""
    started: list[WorkerProcess] = []

    def one(make: Any) -> WorkerProcess:
        started.append(WorkerProcess(shared_service.target, pool_name, BLOCK_COUNT, make))
        return started[-1]

    yield one
    for process in started:
        if process.process.pid is not None and process.process.is_alive():
            os.kill(process.process.pid, signal.SIGCONT)
        process.end()


@pytest.fixture
def stats(shared_service: ServiceProcess, pool_name: str) -> Iterator[Callable[[], PoolStats]]:
    """Looks at the pool."""
    with connect(shared_service.target) as harbor:
        yield lambda: harbor.stats(pool_name).pools[0]


def computed_tokens(served: list[Served]) -> int:
    """Tokens of the prefix that were computed; every other one was read, and was right."""
    assert all(one.is_right for one in served), "[G1] somebody has read what was not written for its tokens"
    return sum(len(PREFIX) - one.cached_tokens for one in served)


def test_sixty_four_clients_compute_a_cold_prefix_once(start: Start, stats: Callable[[], PoolStats]) -> None:
    """[W3] Four processes of sixteen sessions each ask for it at the same time."""
    crowds = [start(Crowd) for _ in range(4)]
    for crowd in crowds:
        crowd.get_ready()
    for crowd in crowds:
        crowd.begin("ask", PREFIX, LONG_S)
    served = [one for crowd in crowds for one in crowd.answer()]
    assert (len(served), computed_tokens(served)) == (64, len(PREFIX))
    counters = stats().counters
    assert (counters.committed_block_count, counters.shadow_block_count) == (PREFIX_BLOCKS, 0)
    assert counters.takeover_count == 0


def test_a_waiter_takes_over_from_a_killed_writer(start: Start, stats: Callable[[], PoolStats]) -> None:
    """[W5] From where that has come to, long before it would count as stalled; the others wait for the next one."""
    writer, crowd = start(Worker), start(SmallCrowd)
    writer.allocate("x", PREFIX)
    writer.stamp("x", 0, PREFIX[:1024])
    writer.commit("x", 1024)
    crowd.begin("ask", PREFIX, LONG_S)
    until(stats, lambda seen: seen.pending_waiting_count == SmallCrowd.session_count)
    writer.kill()
    served = crowd.answer()
    assert computed_tokens(served) == len(PREFIX) - 1024
    assert stats().counters.takeover_count == 1


def test_a_waiter_takes_over_from_a_stopped_writer(start: Start, stats: Callable[[], PoolStats]) -> None:
    """[W5] After two seconds. The writer's own blocks stay its own, and it goes on when it runs again."""
    writer, crowd = start(Worker), start(SmallCrowd)
    crowd.get_ready()
    writer.allocate("x", PREFIX)
    pid = writer.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    served = crowd.ask(PREFIX, LONG_S)
    assert computed_tokens(served) == len(PREFIX)
    assert all(1.5 < one.waited_s < LONG_S / 2 for one in served)
    os.kill(pid, signal.SIGCONT)
    assert writer.commit("x", len(PREFIX)) == len(PREFIX)
    assert stats().counters.shadow_block_count == PREFIX_BLOCKS


def test_the_time_of_a_wait_is_kept_between_processes(start: Start) -> None:
    """[W6] Everybody has a sequence then, and computes the prefix."""
    writer, crowd = start(Worker), start(PoliteCrowd)
    crowd.get_ready()
    writer.allocate("x", PREFIX)
    served = crowd.ask(PREFIX, 0.25)
    assert computed_tokens(served) == len(PREFIX) * SmallCrowd.session_count
    assert all(0.25 <= one.waited_s < LONG_S / 2 for one in served)


@pytest.mark.parametrize("kind", KINDS)
def test_an_allocate_tells_who_else_computes_its_prompt(
    kind: str, shared_service: ServiceProcess, pool_name: str
) -> None:
    """[W2] How much of it, and that it is alive; only as long as it is not committed."""
    with connector(kind) as connect_kind:
        harbors = [connect_kind(shared_service.target) for _ in range(2)]
        one, two = (harbor.open_pool(pool_name, LAYOUT, pool_size(16)) for harbor in harbors)
        first = one.allocate(range(40))
        assert first.pending is None
        second = two.allocate([*range(33), 99])
        assert second.pending is not None
        assert (second.cached_tokens, second.pending.token_count) == (0, 32)
        assert second.pending.session_id == harbors[0].session_id
        assert 0 <= second.pending.idle_s < 2
        first.commit(40)
        third = two.allocate([*range(33), 98])
        assert (third.cached_tokens, third.pending) == (32, None)
        for sequence in (first, second, third):
            sequence.release()


def test_a_resumed_writer_is_waited_for_again(start_fresh: Any, pool_name: str) -> None:
    """[W1] [G7] The service's process is replaced meanwhile: the session names its sequence to the next one."""
    service = start_fresh()
    with connect(service.target) as writing, connect(service.target) as waiting:
        writer = writing.open_pool(pool_name, LAYOUT, pool_size(32)).allocate(range(64))
        other = waiting.open_pool(pool_name, LAYOUT, pool_size(32))
        service.restart_child()
        until(lambda: other.stats().sequence_count == 1)
        with other.allocate(range(65)) as held:
            assert held.pending is not None
            assert held.pending.token_count == 64
        writer.release()
