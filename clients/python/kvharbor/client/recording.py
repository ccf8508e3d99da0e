"""A recording as its reader has it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from kvharbor.client.durations import seconds
from kvharbor.v1 import cache_service_pb2 as cache

if TYPE_CHECKING:
    from kvharbor.client.link import Link

_NAME_BYTES = 8


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request that is over: when it came in after the begin of the recording, and from admission to end how long.

    `block_names`, one for each whole block of the prompt, are of everything up to its end; equal ones in one recording
    are equal prefixes, and nothing else can be told from them.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    duration_s: float
    block_names: tuple[bytes, ...]


class Recording:
    """A stream of the requests of a pool as they end; iterate it, and close it (or leave its `with`) when done.

    Made when the service has begun: what comes in from then on is in it. `block_tokens` is the pool's.
    """

    def __init__(self, stream: Any, link: "Link") -> None:
        self._stream = stream
        self._link = link
        self._closed = False
        try:
            self.block_tokens: int = next(stream).block_tokens
        except grpc.RpcError as failure:
            raise link.error(failure, None) from None

    def __iter__(self) -> Iterator[RecordedRequest]:
        """Yields requests until the recording is closed; raises the HarborError that ends it otherwise."""
        try:
            for reply in self._stream:
                yield from recorded_requests(reply)
        except grpc.RpcError as failure:
            if not self._closed:
                raise self._link.error(failure, None) from None

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stream, also for a thread that waits in it."""
        self._closed = True
        self._stream.cancel()


def recorded_requests(reply: cache.RecordResponse) -> Iterator[RecordedRequest]:
    """Yields what one message of a recording tells, in order."""
    return map(_recorded, reply.requests)


def _recorded(request: cache.RecordedRequest) -> RecordedRequest:
    names = request.block_names
    return RecordedRequest(
        seconds(request.arrival),
        request.input_tokens,
        request.output_tokens,
        seconds(request.duration),
        tuple(names[start : start + _NAME_BYTES] for start in range(0, len(names), _NAME_BYTES)),
    )
