"""The pool that engines share, seen from the test; and what they are asked."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvharbor.client import Pool, PoolStats, connect
from service_process import ServiceProcess

MUSEUM = (
    "You are the guide of a small harbour museum. Answer in one or two plain sentences. The museum has three halls: "
    "the first shows ropes, sails and knots, the second shows charts, compasses and lighthouse lamps, and the third "
    "shows a fishing boat of 1921 that visitors may board. It opens at nine in the morning and closes at five in the "
    "afternoon, and on Mondays it stays closed. Children under twelve enter without paying. Dogs wait outside, where "
    "a bowl of water stands beside the door. "
)
LIBRARY = MUSEUM.replace("harbour museum", "village library").replace("museum", "library")
SETTLED_S = 20.0


@contextmanager
def opened(service: ServiceProcess, name: str = "engines") -> Iterator[Pool]:
    """Opens a pool that is there, as an engine would."""
    with connect(str(service.socket), client_name="test") as harbor:
        (info,) = [each for each in harbor.list_pools() if each.name == name]
        assert info.layout is not None
        yield harbor.open_pool(name, info.layout)


def settled(pool: Pool) -> PoolStats:
    """Returns the pool's figures when nothing is held any more."""
    until_s = time.monotonic() + SETTLED_S
    while True:
        stats = pool.stats()
        held = stats.reserved_block_count + stats.active_block_count + stats.quarantined_block_count
        if not held or time.monotonic() > until_s:
            return stats
        time.sleep(0.05)


def pool_blocks(pool: Pool) -> int:
    """Returns the number of blocks, scratch included."""
    return pool.descriptor.block_count


def wait_until(reached: Callable[[PoolStats], bool], pool: Pool) -> PoolStats:
    """Returns the pool's figures as soon as they are as wanted; fails after a while."""
    until_s = time.monotonic() + SETTLED_S
    while not reached(stats := pool.stats()):
        assert time.monotonic() < until_s, stats
        time.sleep(0.02)
    return stats
