"""E5: a writer is stopped for a while and wakes up. There are no leases: it is alive, and keeps what it has."""

import os
import signal
from pathlib import Path

import grpc

from conftest import StartService
from raw_caller import BLOCK_BYTES, RawCaller, refused
from session_worker import SessionWorker
from waiting import until

START = """
pool_id = caller.open_pool('p', block_count=2)
sequence = caller.allocate(pool_id, *range(32))
(arena,) = caller.attach(pool_id)[1]
result = pool_id
"""
# 0xAA all over both blocks, again and again, until the test lets it commit.
WRITE_ON = """
while not os.path.exists(enough):
    for block in (1, 2):
        os.pwrite(arena, b'\\xaa' * 1024, block * 1024)
result = caller.commit(pool_id, sequence.sequence_id, 32).committed_tokens
"""


def test_a_stopped_writer_keeps_its_blocks_and_commits_when_it_wakes(start_fresh: StartService, tmp_path: Path) -> None:
    """E5: B is refused meanwhile, A's Commit succeeds, and whoever reads A's tokens finds A's bytes."""
    path, enough = str(start_fresh().socket), tmp_path / "enough"
    with RawCaller(path) as b, SessionWorker(path) as a:
        pool_id = a.run(START)
        b.open_pool("p", block_count=2)
        (arena,) = b.attach(pool_id)[1]
        a.begin(WRITE_ON, enough=str(enough))
        until(lambda: os.pread(arena, 1, BLOCK_BYTES), lambda byte: byte == b"\xaa")
        a.signal(signal.SIGSTOP)
        for fresh in range(100, 120):
            with refused() as found:
                b.allocate(pool_id, *range(fresh, fresh + 32))
            assert found[0].code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert found[0].metadata["reservedBlockCount"] == "2"
        enough.touch()
        a.signal(signal.SIGCONT)
        assert a.answer() == 32
        a.close()
        c = b.allocate(pool_id, *range(32), max_cached_tokens=32)
        assert c.cached_tokens == 32
        assert os.pread(arena, 2 * BLOCK_BYTES, BLOCK_BYTES) == b"\xaa" * 2 * BLOCK_BYTES
        os.close(arena)
