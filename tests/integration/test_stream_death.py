"""An engine that keeps its own tables dies: what it wrote to waits for the proof that it is gone [G3], [G6]."""

from google.protobuf import duration_pb2

from integration.stream_pools import BLOCK_COUNT, Party
from kvharbor.v1 import pool_service_pb2
from raw_caller import RawCaller
from raw_stream import RawStream, chain, committing, count, first, leasing
from service_process import ServiceProcess
from session_worker import SessionWorker
from waiting import until

HOLD = """
from raw_stream import RawStream, chain, committing, first, leasing
pool_id = caller.open_pool("p", block_count=16)
stream = RawStream(caller)
(room,) = stream.acquire(pool_id, chain(1, 2, table_block_count=4))
stream.ask(commit_blocks=committing(pool_id, first(room.leased, 2), 1, 2))
stream.lease(pool_id, 3)
result = [pool_id, caller.welcome.session_id]
"""


def counts(watcher: RawCaller, pool_id: str) -> tuple[int, int, int, int, int]:
    """Returns free, reserved, active, cached and quarantined blocks."""
    stats = watcher.stats(pool_id)
    return (
        stats.free_block_count,
        stats.reserved_block_count,
        stats.active_block_count,
        stats.cached_block_count,
        stats.quarantined_block_count,
    )


def test_leased_blocks_of_a_dead_engine_wait_for_its_last_process(service: ServiceProcess) -> None:
    """So do the blocks that it held to read: they are still its, as long as a child of it lives."""
    with RawCaller(str(service.socket)) as watcher, SessionWorker(str(service.socket)) as worker:
        pool_id, session_id = worker.run(HOLD)
        watcher.open_pool("p", block_count=BLOCK_COUNT)
        holding = next(
            each.holdings[0]
            for each in watcher.call(watcher.pools.ListSessions, pool_service_pb2.ListSessionsRequest()).sessions
            if each.session_id == session_id
        )
        assert (holding.sequence_count, holding.private_block_count) == (0, 5)
        assert counts(watcher, pool_id) == (9, 5, 2, 0, 0)
        worker.fork()
        worker.kill()
        until(lambda: counts(watcher, pool_id), lambda now: now == (9, 0, 2, 0, 5))
        worker.end_children()
        until(lambda: counts(watcher, pool_id), lambda now: now == (14, 0, 0, 2, 0))


def test_what_a_dead_engine_only_reads_stays_until_it_is_gone(service: ServiceProcess) -> None:
    """It has released what it had leased; a fork of it may still look at the rest."""
    with RawCaller(str(service.socket)) as watcher, SessionWorker(str(service.socket)) as worker:
        pool_id, _ = worker.run(
            "from raw_stream import RawStream, chain, committing\n"
            "pool_id = caller.open_pool('p', block_count=16)\n"
            "stream = RawStream(caller)\n"
            "(room,) = stream.acquire(pool_id, chain(1, 2, table_block_count=2))\n"
            "stream.ask(commit_blocks=committing(pool_id, room.leased, 1, 2))\n"
            "result = [pool_id, 0]"
        )
        watcher.open_pool("p", block_count=BLOCK_COUNT)
        worker.fork()
        worker.kill()
        with RawStream(watcher) as stream:
            until(lambda: pool_service_pb2.SESSION_STATE_ENDING in [one.state for one in _sessions(watcher)])
            assert counts(watcher, pool_id) == (14, 0, 2, 0, 0)
            # Not even for one who needs all of it.
            assert stream.lease(pool_id, BLOCK_COUNT).reason
            worker.end_children()
            until(lambda: counts(watcher, pool_id), lambda now: now == (14, 0, 0, 2, 0))
            assert count(stream.lease(pool_id, BLOCK_COUNT).leased) == BLOCK_COUNT


def _sessions(watcher: RawCaller) -> list[pool_service_pb2.SessionInfo]:
    return list(watcher.call(watcher.pools.ListSessions, pool_service_pb2.ListSessionsRequest()).sessions)


def test_what_a_dead_engine_waits_for_is_the_next_ones(service: ServiceProcess) -> None:
    """Its ticket is gone with it, and the service goes on."""
    wait = duration_pb2.Duration(seconds=20)
    with RawCaller(str(service.socket)) as caller, RawStream(caller) as stream:
        one = Party(caller, stream, caller.open_pool("p", block_count=BLOCK_COUNT))
        (room,) = stream.acquire(one.pool_id, chain(1, table_block_count=BLOCK_COUNT))
        with RawCaller(str(service.socket)) as dying:
            dying.open_pool("p", block_count=BLOCK_COUNT)
            waiting = RawStream(dying)
            assert waiting.lease(one.pool_id, 8, wait=wait).waiting
            dying.side.close()
            assert waiting.ended() is not None
            until(lambda: caller.stats(one.pool_id).waiting_count, lambda number: number == 0)
            waiting.close()
        stream.ask(commit_blocks=committing(one.pool_id, first(room.leased), 1))
        number = stream.send(lease=leasing(one.pool_id, 1, wait=wait))
        assert stream.answer(number).waiting
    until(lambda: service.process.poll() is None)
