"""Record: the requests of a pool as they end, for a trace."""

from collections.abc import AsyncIterator

from kvharbor.server.calls.gate import Callers, Context, Gate, streamed
from kvharbor.server.messages.wire import duration_message
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.recorder import Ended
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
    async def Record(self, request: pb.RecordRequest, context: Context) -> AsyncIterator[pb.RecordResponse]:
        peer, session = self._callers.administrator(context), self._callers.session(context)
        served = self._pools.visible(peer, request.pool_id)
        with served.recorder.recording() as recording:
            yield pb.RecordResponse(block_tokens=served.pool.config.block_tokens)
            while not session.ended:
                ended = await recording.take(_LOOK_S)
                if ended:
                    yield pb.RecordResponse(requests=[_message(one) for one in ended])
        raise SessionUnknown(session.cause)


def _message(ended: Ended) -> pb.RecordedRequest:
    return pb.RecordedRequest(
        arrival=duration_message(ended.arrival_s),
        input_tokens=ended.input_tokens,
        output_tokens=ended.output_tokens,
        duration=duration_message(ended.duration_s),
        block_names=ended.block_names,
    )
