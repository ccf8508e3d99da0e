"""A recording as a task reads it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc

from kvharbor.client.recording import RecordedRequest, cut_off, recorded_requests
from kvharbor.v1 import cache_service_pb2 as cache

if TYPE_CHECKING:
    from kvharbor.client.aio.link import Link


class Recording:
    """A stream of the requests of a pool as they end; iterate it with `async for`, and close it when done.

    Made when the service has begun: what comes in from then on is in it. `block_tokens` is the pool's. `stop` ends it
    without loss.
    """

    def __init__(self, stream: Any, stopping: asyncio.Event, link: "Link", block_tokens: int) -> None:
        self._stream = stream
        self._stopping = stopping
        self._link = link
        self._closed = False
        self.block_tokens = block_tokens

    @classmethod
    async def begun(
        cls, record: Callable[[AsyncIterator[cache.RecordRequest]], Any], request: cache.RecordRequest, link: "Link"
    ) -> "Recording":
        """Returns a recording that the service has begun, or raises the HarborError that refuses it."""
        stopping = asyncio.Event()
        stream = record(_requests(request, stopping))
        try:
            first = await anext(aiter(stream))
        except grpc.RpcError as failure:
            stopping.set()
            raise link.error(failure, None) from None
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return cls(stream, stopping, link, first.block_tokens)

    async def __aiter__(self) -> AsyncIterator[RecordedRequest]:
        """Yields requests until the recording is stopped or closed; raises the HarborError that ends it otherwise."""
        try:
            async for reply in self._stream:
                for request in recorded_requests(reply):
                    yield request
        except grpc.RpcError as failure:
            if not self._closed:
                raise cut_off(self._link.error(failure, None)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # Closing cancels the call, and that raises the same as a task's own cancellation.
            if not self._closed or (task is not None and task.cancelling()):
                raise

    async def __aenter__(self) -> "Recording":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def stop(self) -> None:
        """Ends the recording with what has ended by now: iterate on until it stops."""
        self._stopping.set()

    def close(self) -> None:
        """Ends the stream at once, also for a task that waits in it; what is not read yet is lost."""
        self._closed = True
        self.stop()
        self._stream.cancel()


async def _requests(request: cache.RecordRequest, stopping: asyncio.Event) -> AsyncIterator[cache.RecordRequest]:
    yield request
    await stopping.wait()
