"""Worker processes share a pool: bytes that one has written are the bytes that another reads."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from integration.client_worker import BLOCK_TOKENS, LAYOUT, WorkerProcess, pool_size
from kvharbor.client import HandoffNotFound, PoolExhausted, Shadow, connect

pytestmark = pytest.mark.slow
Start = Callable[..., WorkerProcess]


@pytest.fixture
def worker(target: str, pool_name: str) -> Iterator[Start]:
    """Starts worker processes on a pool of 8 blocks; ends them with the test."""
    started: list[WorkerProcess] = []

    def start() -> WorkerProcess:
        started.append(WorkerProcess(target, pool_name, block_count=8))
        return started[-1]

    yield start
    for process in started:
        process.end()


def test_what_one_process_commits_another_reads_in_place(worker: Start) -> None:
    """G1: the hit returns the bytes that were written for these tokens; the rest is the reader's to compute."""
    a, b = worker(), worker()
    a.allocate("x", range(40))
    a.stamp("x", 0, range(40))
    assert a.commit("x", 40) == 32
    held = b.allocate("y", [*range(32), 7, 7, 7])
    assert (held.cached_tokens, held.capacity_tokens) == (32, 48)
    assert b.read("y", 0, 32) == list(range(32))
    assert held.table[:2] == a.snapshot("x").table[:2]
    assert held.table[2] != a.snapshot("x").table[2]


def test_what_is_written_and_not_committed_is_nobody_elses(worker: Start) -> None:
    """P1: an entry of the index is made at commit, never before."""
    a, b = worker(), worker()
    a.allocate("x", range(32))
    a.stamp("x", 0, range(32))
    assert b.allocate("y", range(33)).cached_tokens == 0


def test_decoded_tokens_are_shared_as_their_blocks_fill(worker: Start) -> None:
    """Extend and commit with new tokens publish block after block, for another process to find."""
    a, b = worker(), worker()
    a.allocate("x", range(20))
    a.stamp("x", 0, range(20))
    assert a.commit("x", 20) == 16
    assert a.extend("x", 16).capacity_tokens == 48
    a.stamp("x", 20, range(20, 40))
    assert a.commit("x", 40, list(range(20, 40))) == 32
    assert b.allocate("y", range(40)).cached_tokens == 32
    assert b.read("y", 0, 32) == list(range(32))


def test_children_of_a_fork_diverge_on_their_own_copies(worker: Start) -> None:
    """The full block is shared, the tail is copied by the service, whole pages of every plane and layer."""
    a = worker()
    a.allocate("x", range(24))
    a.stamp("x", 0, range(24))
    a.commit("x", 24)
    parent = a.snapshot("x")
    first, second = a.fork("x", ["y", "z"], reserve_tokens=8)
    assert parent.table[0] == first.table[0] == second.table[0]
    assert len({parent.table[1], first.table[1], second.table[1]}) == 3
    assert (first.computed_tokens, first.token_count, first.capacity_tokens) == (24, 24, 32)
    for name, number in (("x", 100), ("y", 200), ("z", 300)):
        a.stamp(name, 24, [number] * 8)
    for name, number in (("x", 100), ("y", 200), ("z", 300)):
        assert a.read(name, 0, 32) == [*range(24), *[number] * 8]
        assert a.commit(name, 32, [number] * 8) == 32


def test_a_sequence_moves_to_another_process_with_its_partial_tail(worker: Start) -> None:
    """Handoff and Adopt move the very blocks; the token works once, and the source's death changes nothing."""
    a, b = worker(), worker()
    a.allocate("x", range(24), reserve_tokens=8)
    a.stamp("x", 0, range(24))
    before = a.snapshot("x").table
    token = a.handoff("x", 24)
    a.kill()
    adopted = b.adopt("y", token)
    assert (adopted.table, adopted.cached_tokens, adopted.computed_tokens) == (before, 24, 24)
    assert b.read("y", 0, 24) == list(range(24))
    b.stamp("y", 24, range(24, 32))
    assert b.commit("y", 32, list(range(24, 32))) == 32
    with pytest.raises(HandoffNotFound):
        b.adopt("again", token)


def test_a_killed_process_gives_its_reserved_blocks_back_and_its_committed_ones_stay(
    worker: Start, target: str, pool_name: str
) -> None:
    """G6: nobody tells the service; the survivor's allocate waits in the queue until the blocks are back."""
    a, b = worker(), worker()
    a.allocate("x", range(32), reserve_tokens=96)
    a.stamp("x", 0, range(32))
    a.commit("x", 32)
    with pytest.raises(PoolExhausted):
        b.allocate("y", range(1000, 1096))
    a.kill()
    held = b.allocate("y", range(1000, 1096), wait_s=10)
    assert len(held.table) == 6
    assert b.allocate("z", range(32), max_cached_tokens=32).cached_tokens == 32
    assert b.read("z", 0, 32) == list(range(32))
    with connect(target) as harbor:
        stats = harbor.stats(pool_name).pools[0]
        assert (stats.sequence_count, stats.free_block_count, stats.quarantined_block_count) == (2, 0, 0)


def test_a_forked_child_does_not_keep_a_dead_workers_session(worker: Start, target: str, pool_name: str) -> None:
    """C7: the child's copy of the side socket is closed at the fork; the kernel would count it as alive."""
    b = worker()
    script = f"""
import os, sys
from integration.client_worker import LAYOUT, pool_size
from kvharbor.client import HarborClosed, connect
harbor = connect({target!r})
pool = harbor.open_pool({pool_name!r}, LAYOUT, pool_size(8))
sequence = pool.allocate(range(128))
if os.fork() == 0:
    try:
        pool.stats()
    except HarborClosed:
        harbor.close()
        print("refused in the child, closed quietly", flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "refused in the child, closed quietly\n"
        with pytest.raises(PoolExhausted):
            b.allocate("y", range(1000, 1128))
        parent.kill()
        assert len(b.allocate("y", range(1000, 1128), wait_s=10).table) == 8


def test_a_clean_end_of_a_process_frees_everything_at_once(worker: Start) -> None:
    """CloseSession asserts that nothing touches the blocks: no quarantine, no wait."""
    a, b = worker(), worker()
    a.allocate("x", range(128))
    a.end()
    assert len(b.allocate("y", range(1000, 1128), wait_s=10).table) == 8


def test_the_second_writer_of_the_same_tokens_gets_a_shadow_and_switches(
    target: str, pool_name: str, worker: Start
) -> None:
    """P7: its own copy stays readable to it, the canonical block replaces it, and the copy is free again."""
    a = worker()
    with connect(target) as harbor:
        pool = harbor.open_pool(pool_name, LAYOUT, pool_size(8))
        mine = pool.allocate(range(16), max_cached_tokens=0)
        a.put(range(16), list(range(16)))
        canonical = a.allocate("x", range(17)).table[0]
        result = mine.commit(16)
        assert [shadow.block_id for shadow in result.shadows] == [canonical]
        assert isinstance(mine.shadows[0], Shadow)
        assert mine.table[0] != canonical
        free_before = pool.stats().free_block_count
        assert mine.switch_shadows() == (0,)
        mine.commit(16)
        assert mine.table.tolist() == [canonical]
        assert pool.stats().free_block_count == free_before + 1
        assert pool.views.numpy("k", 0)[mine.slots(0, BLOCK_TOKENS)][:, 0, 0].tolist() == list(range(16))


def test_a_worker_needs_no_torch(target: str, pool_name: str) -> None:
    """Numpy alone does: the import of torch is blocked in this process."""
    script = f"""
import sys
sys.modules["torch"] = None
from integration.client_worker import Worker
worker = Worker({target!r}, {pool_name!r}, 8)
worker.put(range(32), list(range(32)))
worker.allocate("x", range(33))
assert worker.read("x", 0, 32) == list(range(32))
worker.harbor.close()
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
