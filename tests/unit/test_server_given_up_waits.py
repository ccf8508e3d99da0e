"""Allocates that are given up while they begin to wait for what another session computes."""

import asyncio
import contextlib
from array import array
from pathlib import Path

import pytest
from google.protobuf import duration_pb2

from kvharbor.pool import Commit, Prompt
from kvharbor.pool.steps import finish
from kvharbor.server.calls.sequence_operations import SequenceOperations
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from kvharbor.v1 import cache_service_pb2 as cache
from scenarios import settled
from sessions_here import TENANT, run, sessions_here

BLOCKS = 1500
"""Are matched in three slices."""
TOKENS = 16 * BLOCKS


@pytest.mark.parametrize("later", range(15))
def test_nothing_of_the_wait_is_left(tmp_path: Path, later: int) -> None:
    """S2, S22: its operation ends behind it; what that begins would keep the prompt as long as its writer lives."""

    async def scenario() -> None:
        async with sessions_here(tmp_path, block_count=4 * BLOCKS) as here:
            writer, caller = (Session(n, f"{n}", Peer(n, n, TENANT, administrator=False), "", "") for n in (1, 2))
            opened, _ = [await here.opened(session) for session in (caller, writer)]
            pool = here.served.pool
            pool.tell_time(here.served.owner.clock())
            token_ids = array("I", range(TOKENS + 40)).tobytes()
            view = finish(pool.allocate(writer.number, Prompt(token_ids)))
            finish(pool.commit(writer.number, view.number, Commit(TOKENS)))
            request = cache.AllocateRequest(
                pool_id=here.served.pool_id,
                token_ids=token_ids,
                pending_wait=duration_pb2.Duration(seconds=60),
                request_id="r",
            )
            operations = SequenceOperations(here.pools, handoff_ttl_s=30.0)
            calling = asyncio.create_task(operations.allocate(caller, opened, request))
            for _ in range(later):
                await asyncio.sleep(0)
            calling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await calling
            await settled()
            assert not pool._state.awaiting.by_key
            assert pool.stats().sequence_count == 1
            pool.check_invariants()

    run(scenario())
