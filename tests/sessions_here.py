"""Sessions, pools and the side socket of a service in the test's own process, for what only the inside shows."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kvharbor.gpumem import ArenaKind
from kvharbor.pool import PoolStats, Prompt, SequenceView
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.errors import Draining
from kvharbor.server.memory.arenas import HostArenas
from kvharbor.server.messages.layouts import descriptor_message, layout_of
from kvharbor.server.pools.life import Life
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.served_pool import OpenedPool, ServedPool
from kvharbor.server.pools.session_end import end_in_pool
from kvharbor.server.scheduling.applications import Application
from kvharbor.server.scheduling.owner import offset_clock
from kvharbor.server.sessions.members import Mode
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from kvharbor.server.sessions.sessions import Sessions
from kvharbor.server.side.attaching import Attachment, attachment, status_attachment
from kvharbor.server.side.side import SideRules, SideServer
from kvharbor.server.supervision.keeper import Keeper, Unkept
from kvharbor.v1 import side_pb2
from raw_caller import BLOCK_BYTES, BLOCK_TOKENS, small_layout, tokens

T = TypeVar("T")

DEADLINE_S = 20.0
TENANT = "t"


def crash(failure: BaseException) -> NoReturn:
    """Stands for the end of the process."""
    os.write(2, f"the process would end: {failure!r}\n".encode())
    os._exit(70)


class SessionsHere:
    """A pool of `block_count` blocks of 16 tokens, and the side socket at `path` with ".side"."""

    def __init__(self, path: Path, keeper: Keeper, block_count: int) -> None:
        self.path = str(path)
        self.keeper = keeper
        self.block_count = block_count
        settings = Settings.model_validate({"memory": "64MiB"})
        self.life = Life.kept(keeper) or Life.begun(64 << 20)
        self.life.keep(keeper)
        clock = offset_clock(self.life.clock_offset_s)
        self.pools = Pools(settings, self.life, keeper, HostArenas(), clock=clock, crash=crash)
        self.sessions = Sessions(keeper, end_in_pool, crash)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(f"{path.with_suffix('')}.side").unlink(missing_ok=True)
        listener.bind(f"{path.with_suffix('')}.side")
        listener.listen()
        rules = SideRules(
            epoch=self.life.epoch,
            server_version="0",
            hello_timeout_s=5.0,
            max_sessions=100,
            identify=lambda pid, uid: Peer(pid, uid, TENANT, administrator=False),
            attach=self._attach,
            attach_status=lambda session, asked: status_attachment(self.pools.opened(session, asked.pool_id).served),
            refusal=lambda: None,
            crash=crash,
        )
        self.side = SideServer(listener, self.sessions, rules)

    async def opened(self, session: Session) -> OpenedPool:
        """Opens the pool for a session."""
        size_bytes = (self.block_count + 1) * BLOCK_BYTES
        served, _ = await self.pools.open(session, "p", layout_of(small_layout()), size_bytes)
        self.sessions.keep(session)
        return session.opened[served.pool_id]

    async def allocate(self, session: Session, *ids: int, wait_s: float = 0.0) -> SequenceView:
        """Allocates a prompt of these tokens."""
        opened = await self.opened(session)
        prompt, pool = Prompt(tokens(*ids)), opened.served.pool
        application = Application(
            session, TENANT, opened.turns, lambda: pool.allocate(session.number, prompt), -(-len(ids) // BLOCK_TOKENS)
        )
        return await opened.served.admission.allocate(application, wait_s)

    @property
    def served(self) -> ServedPool:
        """The pool."""
        (served,) = self.pools.all()
        return served

    def stats(self) -> PoolStats:
        """Returns the pool's snapshot."""
        return self.served.pool.stats()

    def session_of(self, pid: int) -> Session:
        """Returns the session that a process leads."""
        return next(session for session in self.sessions.all() if session.peer.pid == pid)

    def _attach(self, session: Session, asked: side_pb2.Attach, mode: Mode) -> Attachment:
        served = self.pools.opened(session, asked.pool_id).served
        names = {
            "pool_id": served.pool_id,
            "name": served.name,
            "tenant": served.tenant,
            "epoch": self.life.epoch,
        }
        message = descriptor_message(served.descriptor, ArenaKind.HOST, served.places, **names)
        return attachment(served, message, asked, mode, allow_mps=False)


@contextlib.asynccontextmanager
async def sessions_here(
    folder: Path, *, block_count: int = 16, keeper: Keeper | None = None
) -> AsyncIterator[SessionsHere]:
    """Runs it while the context lasts. With a `keeper` it takes up what that has, and leaves it as it is."""
    own = Unkept()
    here = SessionsHere(folder / "kv.sock", own if keeper is None else keeper, block_count)
    try:
        here.sessions.restore()
        await here.pools.recover(here.sessions)
        here.side.start()
        yield here
    finally:
        await here.side.close()
        here.sessions.stop()
        await here.pools.close(Draining())
        own.close()


async def until(condition: Callable[[], bool]) -> None:
    """Lets the event loop run until the condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Runs a scenario, and returns what it comes to."""
    return asyncio.run(scenario)
