"""Pools of several parts: one arena a rank, the same blocks in each, and every rank maps its own."""

import mmap
import os
from collections.abc import Iterator

import pytest

from conftest import StartService
from kvharbor.v1 import errors_pb2
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import BLOCK_BYTES, RawCaller, refused, small_layout
from service_process import ServiceProcess
from session_worker import SessionWorker

RANKS = range(2)
BLOCK_COUNT = 8
ARENA_BYTES = (BLOCK_COUNT + 1) * BLOCK_BYTES

# In a worker: `fd` is the memory of the rank's part.
JOIN = """
side, answer = raw.greeted(path, raw.joining(join_token, rank, mode))
response, (fd,) = raw.ask(side, raw.attaching(pool_id, part=rank))
result = [response.attached.part, os.fstat(fd).st_size]
"""
WRITE = "result = os.pwrite(fd, bytes.fromhex(content), block * raw.BLOCK_BYTES)"
READ = "result = os.pread(fd, raw.BLOCK_BYTES, block * raw.BLOCK_BYTES).hex()"
RESUME = "raw.greeted(path, raw.resuming(answer.welcome.member_token, answer.welcome.epoch))[0]"

FORK = """
asked = raw.cache_service_pb2.ForkRequest(pool_id=pool_id, sequence_id=one.sequence_id, child_count=1)
child = caller.call(caller.cache.Fork, asked).children[0]
result = [*memoryview(child.table.block_ids).cast("I")]
"""
COME_BACK = """
caller.resume()
cursors = dict(committed_tokens=16, tail=raw.tokens(*range(16, 20)), computed_tokens=20)
resumed = caller.resume_pool(pool_id, *(raw.held_sequence(each, **cursors) for each in (one, child)))
one = resumed.results[0].sequence
"""


def content(rank: int, block: int) -> str:
    """What a rank writes into its part of a block, in hexadecimal."""
    return (bytes([rank + 1, block]) * (BLOCK_BYTES // 2)).hex()


@pytest.fixture
def ranks(service: ServiceProcess) -> Iterator[list[SessionWorker]]:
    """The leader, rank 0, and rank 1, each a process with the memory of its part."""
    with SessionWorker(service.socket) as leader, SessionWorker(service.socket, without_session=True) as member:
        opening = "pool_id = caller.open_pool('tp', block_count=blocks, layout=raw.small_layout(tp_size=2))"
        leader.run(f"{opening}; response, (fd,) = caller.attach(pool_id)", blocks=BLOCK_COUNT)
        pool_id, join_token = leader.run("result = [pool_id, caller.welcome.join_token]")
        joined = member.run(JOIN, pool_id=pool_id, join_token=join_token, rank=1, mode=0)
        assert joined == [1, -(-ARENA_BYTES // os.sysconf("SC_PAGESIZE")) * os.sysconf("SC_PAGESIZE")]
        yield [leader, member]


def test_the_parts_of_a_pool_hold_what_each_rank_has_written(
    ranks: list[SessionWorker], service: ServiceProcess
) -> None:
    """Byte for byte: through a commit, the copies of forks, and the death of the service's process between them."""
    leader, member = ranks
    table = 'result = [*memoryview(one.table.block_ids).cast("I")]'
    full, tail = leader.run(f"one = caller.allocate(pool_id, *range(20)); {table}")
    for rank, worker in enumerate(ranks):
        for block in (full, tail):
            assert worker.run(WRITE, content=content(rank, block), block=block) == BLOCK_BYTES
    leader.run("caller.commit(pool_id, one.sequence_id, 20)")
    copies = [leader.run(FORK)]
    service.restart_child()
    leader.run(COME_BACK)
    member.run(f"older, side = side, {RESUME}")
    copies.append(leader.run(FORK))
    assert [copy[0] for copy in copies] == [full, full]
    assert len({tail, *(copy[1] for copy in copies)}) == 3
    for rank, worker in enumerate(ranks):
        assert worker.run(READ, block=full) == content(rank, full)
        for block in (tail, copies[0][1], copies[1][1]):
            assert worker.run(READ, block=block) == content(rank, tail)


def test_a_new_rank_finds_the_bytes_of_its_part_again(ranks: list[SessionWorker], service: ServiceProcess) -> None:
    """A hit is a hit for every rank: what another process of its rank had committed."""
    leader, member = ranks
    leader.run("one = caller.allocate(pool_id, *range(16))")
    block = leader.run('result = memoryview(one.table.block_ids).cast("I")[0]')
    for rank, worker in enumerate(ranks):
        worker.run(WRITE, content=content(rank, block), block=block)
    leader.run("caller.commit(pool_id, one.sequence_id, 16)")
    member.kill()
    service.wait_for("session lost")
    with RawCaller(str(service.socket)) as other:
        layout = small_layout(tp_size=2)
        pool_id = other.open_pool("tp", block_count=BLOCK_COUNT, layout=layout)
        sequence = other.allocate(pool_id, *range(17))
        assert sequence.cached_tokens == 16
        assert memoryview(sequence.table.block_ids).cast("I")[0] == block
        for rank in RANKS:
            _, (fd,) = other.attach(pool_id, part=rank)
            assert os.pread(fd, BLOCK_BYTES, block * BLOCK_BYTES).hex() == content(rank, block)
            os.close(fd)


def test_a_part_is_one_of_the_layouts_ranks(harbor: str) -> None:
    """Another is refused with what would be right; the descriptor lists all of them."""
    with RawCaller(harbor) as caller:
        pool_id = caller.open_pool("parts-range", block_count=2, layout=small_layout(tp_size=3))
        for part in (-1, 3, 2**31 - 1):
            response, fds = caller.attach(pool_id, part=part)
            assert (response.refused.reason, fds) == (errors_pb2.ERROR_REASON_INVALID_FIELD, [])
            assert response.refused.metadata["field"] == "part"
            assert response.refused.metadata["value"] == str(part)
            assert response.refused.metadata["limit"].startswith("0 to 2")
        response, (fd,) = caller.attach(pool_id, part=2)
        os.close(fd)
        assert (response.attached.part, response.attached.HasField("device_memory")) == (2, False)
        assert [part.device for part in response.attached.pool.parts] == ["", "", ""]


def test_all_parts_count(service: ServiceProcess) -> None:
    """In the budget, in the room that a pool without a size takes, in Stats, and when the pool is dropped."""
    with RawCaller(str(service.socket)) as caller:

        def available_bytes() -> int:
            return int(caller.call(caller.pools.GetServerInfo, pools.GetServerInfoRequest()).memory_available_bytes)

        whole = available_bytes()
        layout = small_layout(tp_size=3)
        pool_id = caller.open_pool("three", block_count=7, layout=layout)
        assert available_bytes() == whole - 3 * 8 * BLOCK_BYTES
        stats = caller.stats(pool_id)
        assert (stats.block_bytes, stats.total_bytes) == (3 * BLOCK_BYTES, 7 * 3 * BLOCK_BYTES)
        too_much = pools.OpenPoolRequest(name="more", layout=layout, size_bytes=whole // 2)
        with refused() as found:
            caller.call(caller.pools.OpenPool, too_much)
        assert found[0].reason == "INSUFFICIENT_MEMORY"
        assert int(found[0].metadata["neededBytes"]) == whole // 2 * 3
        rest = caller.call(caller.pools.OpenPool, pools.OpenPoolRequest(name="rest", layout=layout)).pool
        assert 0 <= available_bytes() < 3 * mmap.PAGESIZE
        for each in (pool_id, rest.pool_id):
            caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=each))
        assert available_bytes() == whole


def test_a_pool_may_have_more_parts_than_one_message_can_keep(start_fresh: StartService) -> None:
    """Each part is kept under a name of its own, and all of them are there after the service's death."""
    service = start_fresh()
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("many", block_count=1, layout=small_layout(tp_size=100))
        for part in (0, 99):
            _, (fd,) = caller.attach(pool_id, part=part)
            os.pwrite(fd, bytes([part]) * 8, BLOCK_BYTES)
            os.close(fd)
        service.restart_child()
        caller.resume()
        caller.resume_pool(pool_id)
        for part in (0, 99):
            _, (fd,) = caller.attach(pool_id, part=part)
            assert os.pread(fd, 8, BLOCK_BYTES) == bytes([part]) * 8
            os.close(fd)


def test_a_service_of_host_memory_has_no_devices(harbor: str) -> None:
    """Whoever asks for one is told so; GetServerInfo lists none."""
    with RawCaller(harbor) as caller:
        asked = pools.OpenPoolRequest(name="parts-devices", layout=small_layout(), devices=["GPU-0"])
        with refused() as found:
            caller.call(caller.pools.OpenPool, asked)
        assert (found[0].reason, found[0].metadata["field"]) == ("INVALID_FIELD", "devices")
        info = caller.call(caller.pools.GetServerInfo, pools.GetServerInfoRequest())
        assert ([*info.arena_kinds], [*info.devices]) == (["host"], [])
