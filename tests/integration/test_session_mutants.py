"""What would go wrong without each half of the proof that a lost session's blocks are free [G3].

One checker passes on the service as it is, and fails on each mutant of the protocol.
"""

import asyncio
from pathlib import Path

import pytest

from kvharbor.pool import Pool
from kvharbor.pool.steps import Steps
from kvharbor.server.sessions.members import Member
from kvharbor.server.sessions.session import Session
from scenarios import settled
from session_worker import SessionWorker
from sessions_here import SessionsHere, run, sessions_here, until

pytestmark = pytest.mark.slow

CONNECT = "side, answer = raw.greeted(path, raw.hello())"
BLOCKS = 4


async def connected(here: SessionsHere, worker: SessionWorker) -> Session:
    """Opens the worker's session; it has reserved all blocks but one."""
    await asyncio.to_thread(worker.run, CONNECT)
    session = here.session_of(worker.pid)
    await here.allocate(session, *range(16 * (BLOCKS - 1)))
    return session


async def a_child_lives_on(here: SessionsHere) -> None:
    """The worker forks and dies: its child may write until it ends too."""
    with SessionWorker(here.path, without_session=True) as worker:
        session = await connected(here, worker)
        (member,) = session.members
        await asyncio.to_thread(worker.fork)
        worker.kill()
        await until(lambda: member.exited)
        await settled()
        assert here.stats().quarantined_block_count == BLOCKS - 1
        worker.end_children()
        await until(lambda: not here.sessions.all())
        assert here.stats().free_block_count == BLOCKS


async def a_worker_closes_its_socket_and_goes_on(here: SessionsHere) -> None:
    """It may write until it ends."""
    with SessionWorker(here.path, without_session=True) as worker:
        session = await connected(here, worker)
        (member,) = session.members
        await asyncio.to_thread(worker.run, "side.close()")
        await until(lambda: not member.sockets)
        await settled()
        assert here.stats().quarantined_block_count == BLOCKS - 1
        worker.kill()
        await until(lambda: not here.sessions.all())
        assert here.stats().free_block_count == BLOCKS


def check(folder: Path) -> None:
    """Raises AssertionError where a block is free before its last writer is proved gone, or is not free after it."""

    async def scenario() -> None:
        async with sessions_here(folder, block_count=BLOCKS) as here:
            await a_child_lives_on(here)
            await a_worker_closes_its_socket_and_goes_on(here)

    run(scenario())


def pidfd_alone(member: Member) -> bool:
    """A mutant: the exit of the process is taken for the proof."""
    return member.exited


def eof_alone(member: Member) -> bool:
    """A mutant: the end of its sockets is taken for the proof."""
    return not member.sockets


def test_no_block_is_reused_before_its_writers_are_gone(tmp_path: Path) -> None:
    """The checker passes on the service as it is."""
    check(tmp_path)


@pytest.mark.parametrize("mutant", [pidfd_alone, eof_alone])
def test_half_a_proof_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: object) -> None:
    """One half says nothing of a forked child, the other nothing of a process that closes its socket."""
    monkeypatch.setattr(Member, "is_quiet", mutant)
    with pytest.raises(AssertionError):
        check(tmp_path)


def test_a_quarantine_that_is_skipped_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost session's blocks must not be free at once."""
    monkeypatch.setattr(Pool, "end_session", all_at_once)
    with pytest.raises(AssertionError):
        check(tmp_path)


def all_at_once(pool: Pool, session: int) -> Steps[None]:
    """A mutant: the session's end is taken for the end of its processes."""
    yield from pool.session_quiet(session)
    pool.open_session(session, "t")  # so that nothing else of the end fails
