"""Record: the requests of a pool as they end, for a trace."""

import asyncio
from collections.abc import AsyncIterator

from kvharbor.pool.errors import InvalidField
from kvharbor.server.calls.gate import Callers, Context, Gate, streamed
from kvharbor.server.messages.wire import duration_message
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.recorder import Ended, Recording
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.v1 import cache_service_pb2 as pb
from kvharbor.v1 import cache_service_pb2_grpc as rpc

_LOOK_S = 1.0
"""So often a silent recording looks whether its session is still there."""


class RecordCall(rpc.CacheServiceServicer):
    """The call of CacheService that records."""

    def __init__(self, gate: Gate, callers: Callers, pools: Pools) -> None:
        self.gate = gate
        self._callers = callers
        self._pools = pools

    @streamed
    async def Record(
        self, request_iterator: AsyncIterator[pb.RecordRequest], context: Context
    ) -> AsyncIterator[pb.RecordResponse]:
        peer, session = self._callers.administrator(context), self._callers.session(context)
        request = await anext(aiter(request_iterator), None)
        if request is None:
            raise _not_one(0, "send it before you close your side")
        served = self._pools.visible(peer, request.pool_id)
        with served.recorder.recording() as recording:
            reading = asyncio.create_task(_stop_with_caller(request_iterator, recording))
            try:
                yield pb.RecordResponse(block_tokens=served.pool.config.block_tokens)
                while not (recording.is_over or session.ended):
                    ended = await recording.take(_LOOK_S)
                    if ended:
                        yield pb.RecordResponse(requests=[_message(one) for one in ended])
            finally:
                reading.cancel()
        if not recording.is_over:
            raise SessionUnknown(session.cause)


async def _stop_with_caller(requests: AsyncIterator[pb.RecordRequest], recording: Recording) -> None:
    """Stops a recording when its caller has closed its side."""
    async for _ in requests:
        recording.end_with(_not_one(2, "open a stream for each pool"))
    recording.stop()


def _not_one(count: int, remedy: str) -> InvalidField:
    return InvalidField(field="requests", value=count, limit="1 in a stream", remedy=remedy)


def _message(ended: Ended) -> pb.RecordedRequest:
    return pb.RecordedRequest(
        arrival=duration_message(ended.arrival_s),
        input_tokens=ended.input_tokens,
        output_tokens=ended.output_tokens,
        duration=duration_message(ended.duration_s),
        block_names=ended.block_names,
    )
