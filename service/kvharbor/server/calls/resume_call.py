"""Resume: a session tells this process what it held with the one before."""

from kvharbor.pool import Resumed, validate
from kvharbor.pool.steps import Steps
from kvharbor.server.calls.batches import each
from kvharbor.server.calls.gate import Callers, Context, Gate, answered
from kvharbor.server.calls.handles import number_in
from kvharbor.server.messages.wire import block_run_of, held_of, sequence_message, shadow_message, table_message
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.versions import retire_left
from kvharbor.server.session_errors import ResumeRequired
from kvharbor.server.sessions.session import State
from kvharbor.v1 import cache_service_pb2 as pb
from kvharbor.v1 import cache_service_pb2_grpc as rpc
from kvharbor.v1 import types_pb2


class ResumeCall(rpc.CacheServiceServicer):
    """The call of CacheService by which a session goes on in another process of the service."""

    def __init__(self, gate: Gate, callers: Callers, pools: Pools) -> None:
        self.gate = gate
        self._callers = callers
        self._pools = pools

    @answered
    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        session = self._callers.session(context)
        opened = session.opened.get(request.pool_id)
        if opened is None:
            raise self._pools.unknown(request.pool_id)
        if session.state is State.RESUMING:
            # A token may be copied: which process has it, only its side socket proves.
            raise ResumeRequired(request.pool_id)
        pool, number, prefix = opened.served.pool, session.number, opened.handle_prefix

        def resume(item: pb.HeldSequence) -> Steps[pb.ResumeResult]:
            held = held_of(item, number_in(item.sequence.sequence_id, opened, self._pools))
            resumed: Resumed = yield from pool.resume(number, held)
            return pb.ResumeResult(
                status=types_pb2.ItemStatus(),
                sequence=sequence_message(resumed.view, prefix),
                committed_tokens=resumed.committed_tokens,
                shadows=[shadow_message(shadow) for shadow in resumed.shadows],
            )

        blocks = block_run_of("blocks", request.blocks)
        validate.text("version", request.version, validate.MAX_KEY_BYTES)

        def steps() -> Steps[pb.ResumeResponse]:
            if request.HasField("version") and not opened.resumed:  # a late repeat must not undo a bump
                opened.version = request.version
            results = yield from each(
                opened, "sequences", request.sequences, resume, lambda status: pb.ResumeResult(status=status)
            )
            lost = yield from pool.resume_blocks(number, blocks)
            released_count = 0
            if request.complete and not opened.resumed:
                released_count = yield from pool.finish_resume(number)
                opened.resumed = True
            return pb.ResumeResponse(
                results=results, released_block_count=released_count, lost=table_message(lost) if len(lost) else None
            )

        response = await opened.served.owner.run(opened.turns, steps)
        # For one pool it takes as long as it has blocks to free: nobody waits for that.
        opened.served.owner.spawn(retire_left(opened.served))
        return response
