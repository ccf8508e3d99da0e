"""A pool with its owner and admission in the test's own process, for Allocates that wait for what others compute."""

import asyncio
from array import array

from admission_bench import Applicant
from kvharbor.pool import Commit, Pool, PoolConfig, Prompt, SequenceView
from kvharbor.pool.steps import Steps
from kvharbor.server.scheduling.admission import Admission, Granted
from kvharbor.server.scheduling.applications import Application, Patience
from kvharbor.server.scheduling.event_log import EventLog
from kvharbor.server.scheduling.owner import PoolOwner
from kvharbor.server.scheduling.turns import Turns
from kvharbor.server.session_errors import SessionUnknown

BLOCK_TOKENS = 64
COLD_TOKENS = 4096
MINUTE_S = 60.0


class Bench:
    """A pool with its owner and admission, and sessions of one tenant, on the loop's clock."""

    def __init__(self, block_count: int = 10_000, session_count: int = 4, slice_blocks: int = 512) -> None:
        config = PoolConfig(block_count=block_count, block_tokens=BLOCK_TOKENS, slice_blocks=slice_blocks)
        self.pool = Pool(config)
        self.crashes: list[BaseException] = []
        self.owner = PoolOwner(self.pool, EventLog(1 << 20), self.now, self.crashes.append)
        self.admission = Admission(self.owner)
        self.turns = {number: Turns() for number in range(1, session_count + 1)}
        self.applicants = {number: Applicant(number) for number in self.turns}
        for number in self.turns:
            self.pool.open_session(number, "tenant")

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def waiting_count(self) -> int:
        return self.admission.single_flight.waiting_count

    def ask(
        self,
        session: int,
        prompt: Prompt,
        *,
        pending_wait_s: float = MINUTE_S,
        wait_s: float = 0.0,
        patience: Patience | None = None,
    ) -> "asyncio.Task[SequenceView]":
        """Starts an Allocate that lets others finish what they compute."""

        def start() -> Steps[SequenceView]:
            return self.pool.allocate(session, prompt)

        def unless_pending() -> Steps[Granted]:
            return self.pool.allocate_unless_pending(session, prompt)

        block_count = -(-len(prompt.token_ids) // (4 * BLOCK_TOKENS))
        application = Application(
            self.applicants[session],
            "tenant",
            self.turns[session],
            start,
            block_count,
            patience=patience or Patience(),
        )
        return asyncio.create_task(
            self.admission.allocate_after_others(application, unless_pending, wait_s, pending_wait_s)
        )

    async def commit(self, view: SequenceView, computed_tokens: int) -> None:
        """Commits a sequence up to a token."""
        asked = Commit(computed_tokens)
        await self.owner.run(self.turns[view.session], lambda: self.pool.commit(view.session, view.number, asked))

    async def release(self, view: SequenceView) -> None:
        """Ends a sequence."""
        await self.owner.run(self.turns[view.session], lambda: self.pool.release(view.session, view.number))

    async def lose(self, session: int) -> None:
        """Ends a session as the service does when its process is gone."""
        self.applicants[session].ended = True
        self.admission.give_up(self.applicants[session], SessionUnknown())
        await self.owner.run(self.turns[session], lambda: self.pool.end_session(session))

    def check(self) -> None:
        """[W1] to [W6] hold, nobody is left waiting, and the process has not ended for an error."""
        self.pool.check_invariants()
        assert (self.waiting_count, self.pool._state.awaiting.by_key, self.crashes) == (0, {}, [])


def prompt_of(*tokens: int, first: int = 1, count: int = COLD_TOKENS) -> Prompt:
    """A prompt of consecutive token ids, then `tokens`."""
    return Prompt(array("I", [*range(first, first + count), *tokens]).tobytes())
