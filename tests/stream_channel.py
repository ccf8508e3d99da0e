"""The other side of a stream in the test's own process, and what passes over it."""

import asyncio
from typing import Any

from kvharbor.v1 import blocks_pb2
from kvharbor.v1 import stream_service_pb2 as pb


def response(number: int) -> pb.ConverseResponse:
    """Returns some response."""
    return pb.ConverseResponse(number=number, lease=blocks_pb2.LeaseResponse(waiting=True))


class Channel:
    """The other side: requests that it has sent, and responses that it takes as long as it `reads`."""

    def __init__(self, *requests: pb.ConverseRequest, reads: bool = True) -> None:
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        for request in requests:
            self.requests.put_nowait(request)
        self.taken: list[pb.ConverseResponse] = []
        self.reads = asyncio.Event()
        if reads:
            self.reads.set()

    async def read(self) -> Any:
        return await self.requests.get()

    async def write(self, message: Any) -> None:
        await self.reads.wait()
        self.taken.append(message)


def leases(*numbers: int) -> list[pb.ConverseRequest]:
    """Returns requests of these numbers."""
    return [pb.ConverseRequest(number=number, lease=blocks_pb2.LeaseRequest()) for number in numbers]
