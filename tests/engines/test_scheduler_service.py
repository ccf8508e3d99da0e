"""vLLM's schedulers on the real service: the same random events, and what the service then says."""

import contextlib
import functools
import time
from collections.abc import Iterator

import pytest

from engines.churn import Events
from engines.pool_here import settled
from engines.scheduler_configs import BLOCK_TOKENS, vllm_config
from engines.scheduler_world import Engine, World
from kvharbor.client import Credits, Pool, connect
from kvharbor.gpumem import DataType, Layout, Plane
from service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK_COUNT = 40
PAGE_BYTES = 256
LAYOUT = Layout("none", BLOCK_TOKENS, (Plane("kv", 2, DataType.FLOAT32, PAGE_BYTES, "vllm-test"),))
SECONDS = 60.0


@contextlib.contextmanager
def two_pools(service: ServiceProcess, name: str) -> Iterator[list[Pool]]:
    """The same pool, in two sessions."""
    with connect(str(service.socket)) as first, connect(str(service.socket)) as second:
        yield [harbor.open_pool(name, LAYOUT, BLOCK_COUNT * 2 * PAGE_BYTES) for harbor in (first, second)]


def test_a_request_counts_once_however_long_it_stands_back(engine_service: ServiceProcess) -> None:
    """[W8] The one that computes with nothing reused, the one that stood back with all that was computed."""
    world, tokens = World(), [*range(15 * BLOCK_TOKENS)]
    with two_pools(engine_service, "stands-back") as pools:
        first, second = (
            Engine(name, world, pool.blocks, vllm_config(asynchronous=False), BLOCK_COUNT)
            for name, pool in zip("ab", pools, strict=True)
        )
        first.add("computes", tokens, 4)
        first.step()
        second.add("stands back", tokens, 4)
        step_count, computed_at = 0, time.monotonic()
        while "stands back" not in second.cached:
            second.step()
            step_count += 1
            # Rarely, but long before it would count as stalled.
            if not step_count % 50 or time.monotonic() - computed_at > 0.5:
                first.step()
                computed_at = time.monotonic()
        while first.busy or second.busy:
            first.step()
            second.step()
        assert second.cached["stands back"] == 14 * BLOCK_TOKENS
        counters = pools[0].stats().counters
    assert (counters.allocate_count, counters.prompt_token_count) == (2, 2 * 14 * BLOCK_TOKENS)
    assert counters.reused_token_count == 14 * BLOCK_TOKENS


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("killed", [False, True], ids=["", "service killed"])
def test_churn_on_the_service(engine_service: ServiceProcess, asynchronous: bool, killed: bool) -> None:
    """Nothing stays held, and no answer is other than without a cache; also when the service's process is replaced."""
    events = Events(seed=11)
    with two_pools(engine_service, f"churn-{asynchronous}-{killed}") as pools:
        events.engines += [
            Engine(
                name,
                events.world,
                pool.blocks,
                vllm_config(asynchronous=asynchronous),
                BLOCK_COUNT,
                make_store=functools.partial(Credits, pool, 1, idle_s=SECONDS),
            )
            for name, pool in zip("ab", pools, strict=True)
        ]
        until_s = time.monotonic() + SECONDS
        events.happen(300)
        if killed:
            engine_service.kill_child()
        events.happen(300)
        drain(events, until_s)
        # How many events find no service depends on how fast this machine starts one.
        while pools[0].stats().counters.evicted_block_count <= 50:
            events.happen(100)
            drain(events, until_s)
        for pool, engine in zip(pools, events.engines, strict=True):
            pool.blocks.flush()
            assert not engine.scheduler._pool.held
        # What a refill on its way brings to a store that rests goes back behind its answer.
        stats = settled(pools[0])
        assert (stats.reserved_block_count, stats.active_block_count) == (0, 0)
        assert stats.cached_block_count + stats.free_block_count == stats.total_block_count == BLOCK_COUNT - 1
    events.check_answers()


def drain(events: Events, until_s: float) -> None:
    """Goes on until everything is answered; fails when it is too late, by the monotonic clock."""
    while any(engine.busy for engine in events.engines):
        assert time.monotonic() < until_s, [[*engine.scheduler.requests] for engine in events.engines]
        for engine in events.engines:
            engine.step()
