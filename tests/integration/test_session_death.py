"""How a worker may end, or seem to: real processes, each in its own way [G3], [G6].

In each the worker has committed one block of its sequence and reserved another: "held" below.
"""

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import RawCaller
from service_process import ServiceProcess
from session_worker import SessionWorker
from waiting import quickest, seconds, until

HOLD = """
pool_id = caller.open_pool(name, block_count=4)
sequence = caller.allocate(pool_id, *range(32))
caller.commit(pool_id, sequence.sequence_id, 16)
(arena,) = caller.attach(pool_id)[1]
result = [pool_id, caller.welcome.session_id]
"""


class Held:
    """A worker that holds blocks, and somebody else who looks on."""

    def __init__(self, path: str, name: str) -> None:
        self.watcher = RawCaller(path)
        self.worker = SessionWorker(path)
        self.pool_id, self.session_id = self.worker.run(HOLD, name=name)
        self.watcher.open_pool(name, block_count=4)

    def counts(self) -> tuple[int, int, int, int]:
        """Returns free, reserved, active and quarantined blocks."""
        stats = self.watcher.stats(self.pool_id)
        return (
            stats.free_block_count,
            stats.reserved_block_count,
            stats.active_block_count,
            stats.quarantined_block_count,
        )

    def session(self) -> pools.SessionInfo | None:
        """Returns the worker's session as the list has it."""
        response = self.watcher.call(self.watcher.pools.ListSessions, pools.ListSessionsRequest())
        return next((each for each in response.sessions if each.session_id == self.session_id), None)

    def until_over(self) -> None:
        """Waits until nothing of the session is left: the committed block is cached, the other one free."""
        until(self.session, lambda session: session is None)
        assert self.counts() == (3, 0, 0, 0)

    def close(self) -> None:
        """Ends both."""
        self.worker.close()
        self.watcher.close()


@pytest.fixture
def held(harbor: str, request: pytest.FixtureRequest) -> Iterator[Held]:
    """A holding worker, with a pool of its own."""
    both = Held(harbor, re.sub("[^a-z]", "-", request.node.name)[-60:])
    assert both.counts() == (2, 1, 1, 0)
    yield both
    both.close()


def test_a_killed_worker_is_gone_within_a_second(harbor: str) -> None:
    """G6: what was committed survives, what was not is withdrawn."""
    numbers = itertools.count()

    def death_s() -> float:
        with contextlib.closing(Held(harbor, f"killed-{next(numbers)}")) as held:
            began_at = time.monotonic()
            held.worker.kill()
            held.until_over()
            return time.monotonic() - began_at

    assert quickest(death_s, 1) < 1


def test_a_worker_that_exits_without_a_word_is_as_dead_as_a_killed_one(held: Held) -> None:
    """Its exit is the proof, whatever it has said."""
    held.worker.begin("os._exit(0)")
    held.until_over()


def test_a_fork_keeps_what_its_dead_parent_had(held: Held) -> None:
    """The child may write: its parent's exit proves nothing. It ends, and so does the waiting."""
    held.worker.fork()
    held.worker.kill()
    session = until(held.session, lambda it: it is not None and it.members[0].exited)
    assert session is not None
    assert (session.state, session.cause, session.members[0].connected) == (
        pools.SESSION_STATE_ENDING,
        "process exited",
        True,
    )
    assert held.counts() == (2, 0, 1, 1)
    held.watcher.allocate(held.pool_id, *range(100, 132))
    assert held.counts() == (0, 2, 1, 1)
    held.watcher.close()
    held.watcher = RawCaller(held.watcher.path)
    held.worker.end_children()
    held.until_over()


def test_a_child_that_closes_its_copies_holds_nothing_up(held: Held) -> None:
    """As clients do: it closes the socket, and does not have the memory."""
    held.worker.fork(then="caller.side.close(); os.close(arena)")
    held.worker.kill()
    held.until_over()


def test_a_worker_that_executes_something_else_is_lost_and_waited_for(held: Held, tmp_path: Path) -> None:
    """The socket is closed by the exec; the process, which might have passed the memory on, goes on."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held.worker.begin("os.execvp('cat', ['cat', fifo])", fifo=str(fifo))
    session = until(held.session, lambda it: it is not None and it.state == pools.SESSION_STATE_ENDING)
    assert session is not None
    assert (session.cause, session.members[0].exited) == ("side socket ended", False)
    assert held.counts() == (2, 0, 1, 1)
    fifo.write_text("")
    held.until_over()


def test_a_program_that_inherits_the_socket_has_the_session(held: Held, tmp_path: Path) -> None:
    """The same process under another program: nothing has ended."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held.worker.begin("caller.side.set_inheritable(True); os.execvp('cat', ['cat', fifo])", fifo=str(fifo))
    with fifo.open("w"):  # it has been executed
        session = held.session()
        assert session is not None
        assert session.state == pools.SESSION_STATE_LIVE
        assert held.counts() == (2, 1, 1, 0)
    held.until_over()


def test_a_worker_that_closes_its_socket_and_reads_on_is_waited_for(held: Held) -> None:
    """It has said that it is gone, and is not."""
    held.worker.run("caller.side.close()")
    session = until(held.session, lambda it: it is not None and it.state == pools.SESSION_STATE_ENDING)
    assert session is not None
    assert not session.members[0].exited
    assert held.counts() == (2, 0, 1, 1)
    evicted = held.watcher.call(held.watcher.cache.Evict, cache.EvictRequest(pool_id=held.pool_id, all_unheld=True))
    assert evicted.evicted_block_count == 0
    held.worker.kill()
    held.until_over()


@pytest.mark.parametrize("how", ["stopped", "in a C call"])
def test_silence_is_never_death(held: Held, how: str) -> None:
    """A worker that is stopped, or that sits in a call with the interpreter's lock, holds what it holds."""
    if how == "stopped":
        held.worker.signal(signal.SIGSTOP)
    else:
        held.worker.begin(
            "import ctypes, sys; sys.stdout.write('0\\n'); sys.stdout.flush(); ctypes.PyDLL(None).pause()"
        )
        held.worker.answer()
    for _ in range(50):
        held.watcher.allocate(held.pool_id, *range(16), max_cached_tokens=16, request_id="again")
    session = held.session()
    assert session is not None
    assert session.state == pools.SESSION_STATE_LIVE
    assert held.counts() == (2, 1, 1, 0)
    held.worker.kill()
    until(held.session, lambda it: it is None)


def test_a_protocol_error_loses_the_session_until_its_process_is_gone(held: Held) -> None:
    """What speaks nonsense may still write."""
    held.worker.run("caller.side.sendall(b'\\xff' * 8)")
    session = until(held.session, lambda it: it is not None and it.state == pools.SESSION_STATE_ENDING)
    assert session is not None
    assert "frame" in session.cause
    assert held.counts() == (2, 0, 1, 1)
    held.worker.kill()
    held.until_over()


def test_a_lost_session_that_has_nothing_is_forgotten_at_once(harbor: str) -> None:
    """Its process lives on, as this one does, and may connect as often as it likes."""
    with RawCaller(harbor) as watcher, RawCaller(harbor) as lost:
        pool_id = lost.open_pool("nothing-held")
        sequence = lost.allocate(pool_id, 1, 2, 3)
        item = cache.ReleaseItem(sequence_id=sequence.sequence_id)
        lost.call(lost.cache.Release, cache.ReleaseRequest(pool_id=pool_id, items=[item]))
        lost.abandon()
        listing = pools.ListSessionsRequest()
        until(
            lambda: [each.session_id for each in watcher.call(watcher.pools.ListSessions, listing).sessions],
            lambda ids: lost.welcome.session_id not in ids,
        )


def test_a_session_is_killed_through_its_pidfd(held: Held) -> None:
    """As an administrator does with a worker that hangs; once more it is unknown, or has nobody to kill."""
    held.worker.signal(signal.SIGSTOP)
    request = pools.KillSessionRequest(session_id=held.session_id)
    assert held.watcher.call(held.watcher.pools.KillSession, request).killed_process_count == 1
    assert held.worker.process.wait(10) == -signal.SIGKILL
    held.until_over()


def test_many_deaths_at_once_are_over_within_a_second(service: ServiceProcess) -> None:
    """While others call on: nobody waits in somebody else's queue."""
    path = str(service.socket)
    with RawCaller(path) as watcher:
        pool_id = watcher.open_pool("p", block_count=64)

        def deaths_s() -> float:
            workers = [SessionWorker(path) for _ in range(8)]
            try:
                for number, worker in enumerate(workers):
                    worker.run(
                        "caller.open_pool('p', block_count=64)\ncaller.allocate(pool_id, *range(base, base + 96))",
                        pool_id=pool_id,
                        base=1000 * number,
                    )
                assert watcher.stats(pool_id).free_block_count == 64 - 8 * 6
                for worker in workers:
                    worker.process.kill()
                return seconds(lambda: until(lambda: watcher.stats(pool_id).free_block_count == 64))
            finally:
                for worker in workers:
                    worker.close()

        assert quickest(deaths_s, 1) < 1
