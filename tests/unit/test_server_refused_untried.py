"""One who may not pass those that wait for room is refused without a try: it counts, and costs nothing a block."""

import asyncio
from dataclasses import dataclass
from typing import NoReturn

import pytest

from kvharbor.pool import Pool, PoolConfig, Prompt, SequenceView
from kvharbor.pool.errors import PoolExhausted
from kvharbor.pool.steps import Steps, finish
from kvharbor.server.scheduling.admission import Admission
from kvharbor.server.scheduling.applications import Application
from kvharbor.server.scheduling.event_log import EventLog
from kvharbor.server.scheduling.owner import PoolOwner
from kvharbor.server.scheduling.turns import Turns

TENANT = "a"
PROMPT = Prompt(bytes(4 * 16))


@dataclass(frozen=True)
class Applicant:
    """A session, as far as waiting is concerned."""

    number: int
    ended: bool = False


def application(pool: Pool, session: int) -> Application[SequenceView]:
    """Returns a session's request for three blocks."""

    def start() -> Steps[SequenceView]:
        return pool.allocate(session, PROMPT, reserve_tokens=32)

    return Application(Applicant(session), TENANT, Turns(), start, 3)


def looks_at_every_block(_: Pool) -> NoReturn:
    """In the place of what costs some nanoseconds a block."""
    raise AssertionError("a refusal is for what is there to know at once")


@pytest.mark.parametrize("wait_s", [0.0, 0.01], ids=["at once", "after a wait"])
def test_a_refusal_without_a_try_counts_and_is_told_from_counters(
    monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    """G9: an engine that spins while others wait is refused thousands of times a second."""
    pool = Pool(PoolConfig(block_count=4, block_tokens=16))
    for session in (1, 2):
        pool.open_session(session, TENANT)
    finish(pool.allocate(1, PROMPT, reserve_tokens=16))

    async def scenario() -> PoolExhausted:
        loop = asyncio.get_running_loop()
        owner = PoolOwner(pool, EventLog(1 << 20), loop.time, lambda _: None)
        admission = Admission(owner, guarantee=lambda: 1)
        first = asyncio.create_task(admission.allocate(application(pool, 2), 60.0))
        while not admission.waiting_count:
            await asyncio.sleep(0)
        before = pool.stats().counters.refused_count
        with monkeypatch.context() as patched:
            patched.setattr(Pool, "stats", looks_at_every_block)
            with pytest.raises(PoolExhausted) as refused:
                await admission.allocate(application(pool, 1), wait_s)
        assert pool.stats().counters.refused_count > before
        first.cancel()
        await owner.close()
        return refused.value

    attributes = asyncio.run(scenario()).attributes
    names = ("needed", "available", "free", "cached", "reserved", "active", "warm", "quarantined", "usable")
    assert [attributes[f"{name}_block_count"] for name in names] == [3, 0, 2, 0, 2, 0, 0, 0, 4]
