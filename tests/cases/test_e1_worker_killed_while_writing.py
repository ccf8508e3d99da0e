"""E1: a writer is killed between start and end of a write: nothing is left in progress for ever."""

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import RawCaller, tokens
from session_worker import SessionWorker
from waiting import until

PROMPT = range(64)
START = """
pool_id = caller.open_pool('p', block_count=8)
sequence = caller.allocate(pool_id, *range(64))
caller.commit(pool_id, sequence.sequence_id, 32)
(arena,) = caller.attach(pool_id)[1]
result = pool_id
"""
# Blocks 1 and 2 are committed: it is at the third when it dies, again and again.
WRITE_ON = "while True: os.pwrite(arena, b'\\xaa' * 512, 3 * 1024)"


def test_what_was_committed_survives_and_the_rest_is_withdrawn(start_fresh: StartService) -> None:
    """E1: 2 blocks cached and 6 free; the prompt is a hit of 32 tokens, computed on, and the log says why."""
    service = start_fresh()
    path = str(service.socket)
    with RawCaller(path) as b, SessionWorker(path) as a:
        pool_id = a.run(START)
        b.open_pool("p", block_count=8)
        a.begin(WRITE_ON)
        # It is writing once its bytes are there.
        (arena,) = b.attach(pool_id)[1]
        with open(arena, "rb", buffering=0) as memory:  # noqa: PTH123 - a descriptor
            until(lambda: (memory.seek(3 * 1024), memory.read(1))[1], lambda byte: byte == b"\xaa")
        a.kill()
        stats = until(lambda: b.stats(pool_id), lambda now: now.sequence_count == 0)
        assert (stats.active_block_count, stats.cached_block_count, stats.free_block_count) == (0, 2, 6)
        assert stats.quarantined_block_count == 0
        lookup = cache.LookupRequest(pool_id=pool_id, token_ids=tokens(*PROMPT))
        assert b.call(b.cache.Lookup, lookup).present_tokens == 32
        sequence = b.allocate(pool_id, *PROMPT)
        assert (sequence.cached_tokens, sequence.capacity_tokens) == (32, 64)
        assert b.commit(pool_id, sequence.sequence_id, 64).committed_tokens == 64
    assert service.wait_for("blocks quarantined")["block_count"] == 2
    assert service.wait_for("session ended")["cause"] in ("process exited", "side socket ended")
