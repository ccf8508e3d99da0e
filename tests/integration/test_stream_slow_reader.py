"""A client that does not read its stream is cut off; what it was not told of is not kept for it [S9], [S22]."""

from kvharbor.server.stream.outbox import MAX_UNSENT
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import RawCaller, Refused
from raw_stream import RawStream, leasing, releasing
from service_process import ServiceProcess
from waiting import until

BLOCK_COUNT = 20_000
TABLE_BLOCKS = 4_000


def test_who_does_not_read_is_cut_off(service: ServiceProcess) -> None:
    """Long before the service's memory is full. He may open another stream, and has what he was told of."""
    path = str(service.socket)
    with RawCaller(path) as caller, RawCaller(path) as watcher, RawStream(caller, reads=False) as stream:
        pool_id = caller.open_pool("p", block_count=BLOCK_COUNT)
        sequence = caller.allocate(pool_id, 1, reserve_tokens=16 * TABLE_BLOCKS - 1)
        whole_table = cache.ExtendItem(sequence_id=sequence.sequence_id, known_block_count=0)
        for _ in range(MAX_UNSENT):
            stream.send(extend=cache.ExtendRequest(pool_id=pool_id, items=[whole_table]))
            stream.send(lease=leasing(pool_id, 1))
        assert service.wait_for("stream cut off")["unsent_count"] <= MAX_UNSENT
        stream.begin_reading()
        failure = stream.ended()
        assert failure is not None
        assert Refused(failure).reason == "WATCHER_TOO_SLOW"
        told = [response.lease.leased for response in stream.unread if response.WhichOneof("result") == "lease"]
        assert 0 < len(told) < MAX_UNSENT

        def leased_count() -> int:
            return int(watcher.stats(pool_id).reserved_block_count) - TABLE_BLOCKS

        # One may have been on its way.
        until(leased_count, lambda held: held - len(told) in (0, 1))
        with RawStream(caller) as again:
            assert again.ask(release_blocks=releasing(pool_id, *told)).released_block_count == len(told)


def test_a_session_may_end_with_answers_that_have_not_left(service: ServiceProcess) -> None:
    """What they tell of is given back with all that the session has, and the service goes on."""
    path = str(service.socket)
    with RawCaller(path) as watcher:
        pool_id = watcher.open_pool("p", block_count=BLOCK_COUNT)
        with RawCaller(path) as caller, RawStream(caller, reads=False) as stream:
            caller.open_pool("p", block_count=BLOCK_COUNT)
            sequence = caller.allocate(pool_id, 1, reserve_tokens=16 * TABLE_BLOCKS - 1)
            whole_table = cache.ExtendItem(sequence_id=sequence.sequence_id, known_block_count=0)
            for _ in range(MAX_UNSENT // 2 - 1):
                stream.send(extend=cache.ExtendRequest(pool_id=pool_id, items=[whole_table]))
                stream.send(lease=leasing(pool_id, 1))
            reserved_count = TABLE_BLOCKS + MAX_UNSENT // 2 - 1
            until(lambda: watcher.stats(pool_id).reserved_block_count, lambda count: count == reserved_count)
            caller.side.close()
            # Its process lives on: what it had reserved waits for that.
            until(lambda: watcher.stats(pool_id).quarantined_block_count, lambda count: count == reserved_count)
        until(lambda: watcher.stats(pool_id).free_block_count, lambda count: count == BLOCK_COUNT)
        assert len(service.entries("ready")) == 1
