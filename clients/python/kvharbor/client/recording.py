"""A recording as its reader has it."""

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from kvharbor.client.durations import seconds
from kvharbor.client.errors import HarborError, ServiceUnreachable
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

    Made when the service has begun: what comes in from then on is in it. `block_tokens` is the pool's. `stop` ends it
    without loss.
    """

    def __init__(
        self, record: Callable[[Iterator[cache.RecordRequest]], Any], request: cache.RecordRequest, link: "Link"
    ) -> None:
        # gRPC's thread waits in it for the end, which a signal handler may put.
        self._requests: queue.SimpleQueue[cache.RecordRequest | None] = queue.SimpleQueue()
        self._requests.put(request)
        self._stream = record(iter(self._requests.get, None))
        self._link = link
        self._closed = False
        try:
            self.block_tokens: int = next(self._stream).block_tokens
        except grpc.RpcError as failure:
            self.stop()
            raise link.error(failure, None) from None

    def __iter__(self) -> Iterator[RecordedRequest]:
        """Yields requests until the recording is stopped or closed; raises the HarborError that ends it otherwise."""
        try:
            for reply in self._stream:
                yield from recorded_requests(reply)
        except grpc.RpcError as failure:
            if not self._closed:
                raise cut_off(self._link.error(failure, None)) from None

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def stop(self) -> None:
        """Ends the recording with what has ended by now: iterate on until it stops. For signal handlers too."""
        self._requests.put(None)

    def close(self) -> None:
        """Ends the stream at once, also for a thread that waits in it; what is not read yet is lost."""
        self._closed = True
        self.stop()
        self._stream.cancel()


def cut_off(error: HarborError) -> HarborError:
    """Returns what a recording that was under way has ended with."""
    if isinstance(error, ServiceUnreachable):
        return ServiceUnreachable("the service's process has ended, and the recording with it: record anew")
    return error


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
