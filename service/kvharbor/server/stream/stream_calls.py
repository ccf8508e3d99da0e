"""StreamService: who converses, and how each stream ends."""

from collections.abc import AsyncIterator

import grpc

from kvharbor.server.calls.gate import Callers, Context, Gate, conversing
from kvharbor.server.calls.sequence_operations import SequenceOperations
from kvharbor.server.errors import ServerError
from kvharbor.server.pools.pools import Pools
from kvharbor.server.stream.conversation import Conversation, Replaced
from kvharbor.server.stream.responses import Responses
from kvharbor.v1 import stream_service_pb2 as pb
from kvharbor.v1 import stream_service_pb2_grpc as rpc


class StreamCalls(rpc.StreamServiceServicer):
    """StreamService. A session has one stream; the next one takes its place."""

    def __init__(self, gate: Gate, callers: Callers, pools: Pools, sequences: SequenceOperations) -> None:
        self.gate = gate
        self._callers = callers
        self._pools = pools
        self._sequences = sequences
        self._open: set[Conversation] = set()

    @conversing
    async def Converse(  # type: ignore[override]  # grpc.aio takes a coroutine too, that reads and writes
        self,
        request_iterator: AsyncIterator[pb.ConverseRequest],  # noqa: ARG002 - the signature is gRPC's
        context: Context,
    ) -> None:
        session = self._callers.session(context)
        conversation = Conversation(session, self.gate)
        responses = Responses(conversation, session, self._pools, self._sequences)
        earlier = [one.over for one in self._open if one.session is session]
        if session.stream is not None:
            session.stream.end(Replaced())
        session.stream = conversation
        self._open.add(conversation)
        try:
            try:
                # Who waits for these knows from then on that this stream is the session's.
                await context.send_initial_metadata(self.gate.reply_metadata)
                await conversation.run(context, earlier)
            finally:
                if session.stream is conversation:
                    session.stream = None
                await responses.close()
                self._open.discard(conversation)
                conversation.over.set_result(None)
        except Replaced:
            await context.abort(grpc.StatusCode.CANCELLED, "another stream of the session has taken this one's place")

    def finish(self, reason: ServerError) -> None:
        """Ends every stream with `reason`, after what is under way."""
        for conversation in [*self._open]:
            conversation.finish(reason)
