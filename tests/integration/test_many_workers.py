"""Workers share a pool that is too small for them, some are killed, and every byte of every hit is verified."""

import contextlib
import multiprocessing
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import pytest

from conftest import StartService
from integration.client_worker import LAYOUT, pool_size
from integration.sharing_worker import Given, SharingWorker, share
from kvharbor.client import PoolStats, connect
from service_process import ServiceProcess

pytestmark = pytest.mark.slow

POOL = "many-workers"
BLOCK_COUNT = 24
WORKER_COUNT = 3
KILL_COUNT = 4
ACT_COUNT = 400
SEED = 20240607
DEADLINE_S = 20.0


class Crowd:
    """The worker processes. Each that is killed is replaced."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._random = random.Random(SEED)
        self._started = 0
        self._workers: dict[Connection, BaseProcess] = {}
        self.wrong: list[str] = []
        self.given: list[Given] = []

    def start(self) -> None:
        """Adds a worker."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._started += 1
        arguments = (theirs, self._target, POOL, SEED + self._started, ACT_COUNT)
        process = context.Process(target=share, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._workers[ours] = process

    def run(self, kill_count: int) -> None:
        """Follows all of them to their ends, and kills so many on the way: each at some act of its own."""
        patience = self._random.randint(10, ACT_COUNT // 2)
        while self._workers:
            ready = wait(list(self._workers), timeout=DEADLINE_S)
            assert ready, "no worker has done anything for too long"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                if not self._hear(pipe):
                    self._part_with(pipe)
                    continue
                patience -= 1
                if kill_count and not patience:
                    kill_count -= 1
                    patience = self._random.randint(10, ACT_COUNT // 2)
                    self._workers[pipe].kill()
                    self.start()

    def end(self) -> None:
        """Kills whoever is left."""
        for pipe, process in self._workers.items():
            process.kill()
            process.join(DEADLINE_S)
            pipe.close()

    def _hear(self, pipe: Connection) -> bool:
        """Takes a worker's next message in; False at its end."""
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, str):
            self.wrong.append(message)
        if isinstance(message, Given):
            self.given.append(message)
            self._pass_on(message)
        return True

    def _pass_on(self, given: Given) -> None:
        to = self._random.choice(list(self._workers))
        with contextlib.suppress(OSError):  # it has just ended: the test adopts what nobody has
            to.send(given)

    def _part_with(self, pipe: Connection) -> None:
        self._workers.pop(pipe).join(DEADLINE_S)
        pipe.close()


@pytest.fixture
def service(start_fresh: StartService) -> ServiceProcess:
    """A service in which a hand-off soon ends: of one whose worker is killed before it tells, nobody has the token."""
    return start_fresh(handoff_ttl_s="2")


@pytest.fixture
def crowd(service: ServiceProcess) -> Iterator[Crowd]:
    """Workers yet to be started."""
    crowd = Crowd(service.target)
    yield crowd
    crowd.end()


def settled(target: str) -> PoolStats:
    """Returns the counts once nothing is held any more, or after a time in which all hand-offs must have ended."""
    deadline = time.monotonic() + DEADLINE_S
    with connect(target) as harbor:
        while True:
            stats = harbor.stats(POOL).pools[0]
            if not any(held(stats)) or time.monotonic() > deadline:
                return stats


def held(stats: PoolStats) -> tuple[int, int, int, int]:
    """Returns what somebody holds."""
    return (
        stats.reserved_block_count,
        stats.active_block_count,
        stats.quarantined_block_count,
        stats.sequence_count,
    )


def test_every_hit_has_the_bytes_of_its_tokens_while_workers_die(crowd: Crowd, service: ServiceProcess) -> None:
    """G1, G2, G3, G6: through eviction, forks, hand-offs, shadows and kill -9; in the end nothing is held."""
    target = service.target
    with connect(target) as harbor:
        harbor.open_pool(POOL, LAYOUT, pool_size(BLOCK_COUNT))
    for _ in range(WORKER_COUNT):
        crowd.start()
    crowd.run(KILL_COUNT)
    assert crowd.wrong == []

    heir = SharingWorker(target, POOL, SEED, crowd.given.append)
    for given in crowd.given:
        heir.adopt(given)
    heir.close()
    stats = settled(target)
    assert held(stats) == (0, 0, 0, 0)
    assert stats.free_block_count + stats.cached_block_count == BLOCK_COUNT
    counters = stats.counters
    assert counters.committed_block_count - counters.evicted_block_count == stats.cached_block_count
    exercised = counters.hit_count, counters.shadow_block_count, counters.evicted_block_count
    assert min(*exercised, counters.copied_block_count, len(crowd.given)) > 0
