"""A pool with its owner and admission in the test's own process, for Allocates that wait."""

import asyncio
import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from kvharbor.pool import Commit, Pool, PoolConfig, Prompt, SequenceView
from kvharbor.pool.steps import Steps, finish
from kvharbor.server.scheduling.admission import Admission
from kvharbor.server.scheduling.applications import Application, Patience
from kvharbor.server.scheduling.event_log import EventLog
from kvharbor.server.scheduling.owner import PoolOwner
from kvharbor.server.scheduling.turns import Turns

BLOCK_TOKENS = 16


@dataclass
class Applicant:
    """A session, as far as waiting is concerned."""

    number: int
    ended: bool = False


class Bench:
    """A pool of so many blocks with its owner and admission, on a clock that the test sets."""

    def __init__(self, block_count: int, sessions: int = 3, guaranteed_count: int = 0, slice_blocks: int = 512) -> None:
        self.now = 1000.0
        self.pool = Pool(PoolConfig(block_count=block_count, block_tokens=BLOCK_TOKENS, slice_blocks=slice_blocks))
        self.crashes: list[BaseException] = []
        self.owner = PoolOwner(self.pool, EventLog(1 << 20), lambda: self.now, self.crashes.append)
        self.admission = Admission(self.owner, guarantee=lambda: guaranteed_count)
        self.turns = {number: Turns() for number in range(1, sessions + 1)}
        self.applicants = {number: Applicant(number) for number in self.turns}
        for number in self.turns:
            self.pool.open_session(number, self.tenant(number))
        self._fresh = itertools.count(1)

    def tenant(self, session: int) -> str:
        """Sessions 1 and 2 are of one tenant."""
        return "a" if session < 3 else "b"

    def prompt(self, block_count: int) -> Prompt:
        """Returns a prompt of tokens that were never seen."""
        token = next(self._fresh)
        return Prompt(array("I", [token] * (block_count * BLOCK_TOKENS)).tobytes())

    def allocate(
        self,
        session: int,
        block_count: int,
        wait_s: float = 0.0,
        prompt: Prompt | None = None,
        patience: Patience | None = None,
        give_back: Callable[[SequenceView], None] = lambda _: None,
        estimated: int | None = None,
    ) -> "asyncio.Task[SequenceView]":
        """Starts an Allocate of fresh blocks."""
        asked = prompt or self.prompt(block_count)

        def start() -> Steps[SequenceView]:
            return self.pool.allocate(session, asked)

        application = Application(
            self.applicants[session],
            self.tenant(session),
            self.turns[session],
            start,
            block_count,
            None if estimated is None else lambda: _known(estimated),
            patience=patience or Patience(),
            give_back=give_back,
        )
        return asyncio.create_task(self.admission.allocate(application, wait_s))

    async def release(self, view: SequenceView) -> None:
        """Ends a sequence."""
        await self.owner.run(self.turns[view.session], lambda: self.pool.release(view.session, view.number))


def _known(block_count: int) -> Steps[int]:
    yield from ()
    return block_count


def commit_all(bench: Bench, view: SequenceView) -> None:
    """Commits all tokens of a sequence."""
    finish(bench.pool.commit(view.session, view.number, Commit(computed_tokens=view.token_count)))
