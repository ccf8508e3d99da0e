"""An Adopt on a stream whose answer does not leave: the sequence is its session's, and nobody could name it. [S22]"""

import asyncio
from pathlib import Path

import pytest

from kvharbor.pool import Commit
from kvharbor.pool.steps import finish
from kvharbor.server.calls.gate import Gate
from kvharbor.server.calls.sequence_operations import SequenceOperations
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from kvharbor.server.stream.conversation import Conversation, Replaced
from kvharbor.server.stream.responses import Responses
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import stream_service_pb2 as pb
from raw_stream import leasing
from scenarios import settled
from sessions_here import TENANT, run, sessions_here
from stream_channel import Channel


@pytest.mark.parametrize(("request_id", "left"), [("", 0), ("a", 1)])
def test_it_ends_unless_it_has_a_name(tmp_path: Path, request_id: str, left: int) -> None:
    """One with a name is found by asking again."""

    async def scenario() -> None:
        async with sessions_here(tmp_path) as here:
            session = Session(1, "token", Peer(1, 1, TENANT, administrator=False), "test", "0")
            pool = (await here.opened(session)).served.pool
            view = await here.allocate(session, *range(20))
            handed = finish(pool.handoff(1, view.number, Commit(20), token="secret", expires_at=1e12))
            assert pool.stats().sequence_count == 1
            gate = Gate(here.life.epoch)
            gate.open()
            conversation = Conversation(session, gate)
            responses = Responses(conversation, session, here.pools, SequenceOperations(here.pools, handoff_ttl_s=30.0))
            pool_id = here.served.pool_id
            adopting = cache.AdoptRequest(pool_id=pool_id, handoff_token=handed.token, request_id=request_id)
            # What is being written counts as having left: the answer to the Lease.
            channel = Channel(
                pb.ConverseRequest(number=1, lease=leasing(pool_id, 1)),
                pb.ConverseRequest(number=2, adopt=adopting),
                reads=False,
            )
            running = asyncio.create_task(conversation.run(channel))
            await settled()
            assert pool.holding(1).sequence_count == 1
            conversation.end(Replaced())
            with pytest.raises(Replaced):
                await running
            await responses.close()
            await settled()
            assert pool.holding(1).sequence_count == left

    run(scenario())
