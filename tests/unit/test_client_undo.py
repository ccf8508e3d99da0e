"""Calls that nobody will see the reply of are taken back. The service here is a stub that never replies to them."""

import asyncio
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvharbor.client import DeadlineExceeded
from kvharbor.client.address import Address
from kvharbor.client.aio.link import Link as AioLink
from kvharbor.client.calls import NO_NAMESPACE, Call, PoolCalls
from kvharbor.client.link import Link
from kvharbor.client.options import Options
from kvharbor.v1 import cache_service_pb2 as cache

DEADLINE_S = 10
SHORT_S = 0.2
"""Of a call that is to be out of time: once there is a connection, it is taken by then."""
CALLS = PoolCalls("e.1")


class Silent:
    """Takes what is asked and never says so; keeps requests and releases for the test to read."""

    def __init__(self) -> None:
        self.taken: queue.Queue[Any] = queue.Queue()
        self.released: queue.Queue[cache.ReleaseRequest] = queue.Queue()

    def take(self, request: Any, context: grpc.ServicerContext) -> None:
        ended: queue.Queue[None] = queue.Queue()
        context.add_callback(lambda: ended.put(None))
        self.taken.put(request)
        ended.get(timeout=DEADLINE_S)
        context.abort(grpc.StatusCode.ABORTED, "nobody waits for this any more")

    def release(self, request: cache.ReleaseRequest, context: grpc.ServicerContext) -> cache.ReleaseResponse:
        self.released.put(request)
        return cache.ReleaseResponse(results=[cache.ReleaseResult() for _ in request.items])

    def handlers(self) -> grpc.GenericRpcHandler:
        behaviours: dict[Any, Callable[..., Any]] = {
            cache.AllocateRequest: self.take,
            cache.ForkRequest: self.take,
            cache.AdoptRequest: self.take,
            cache.CommitRequest: self.take,
            cache.ReleaseRequest: self.release,
        }
        return grpc.method_handlers_generic_handler(
            "kvharbor.v1.CacheService",
            {
                kind.DESCRIPTOR.name.removesuffix("Request"): grpc.unary_unary_rpc_method_handler(
                    behaviour,
                    request_deserializer=kind.FromString,
                    response_serializer=lambda reply: reply.SerializeToString(),
                )
                for kind, behaviour in behaviours.items()
            },
        )


@pytest.fixture
def silent() -> Iterator[tuple[Silent, Address]]:
    """The stub and where it is."""
    stub = Silent()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((stub.handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield stub, Address(f"127.0.0.1:{port}", None)
        server.stop(None).wait(DEADLINE_S)


def allocate() -> Call[Any]:
    return CALLS.allocate([1], namespace=NO_NAMESPACE, extra_keys=(), request_id=None, wait_s=0)


CALLS_TO_UNDO: dict[str, Callable[[], Call[Any]]] = {
    "allocate": allocate,
    "fork": lambda: CALLS.fork("e.1.2.3", 2, reserve_tokens=0, group=""),
    "adopt": lambda: CALLS.adopt("secret", request_id=None, group=""),
}


def undone_ids(stub: Silent) -> tuple[list[str], list[str]]:
    """The request_ids that the stub has taken, those of children included, and those that were released."""
    request = stub.taken.get(timeout=DEADLINE_S)
    released = stub.released.get(timeout=DEADLINE_S)
    children = range(request.child_count) if isinstance(request, cache.ForkRequest) else None
    taken = [f"{request.request_id}/{child}" for child in children] if children else [request.request_id]
    return taken, [item.request_id for item in released.items]


@pytest.mark.parametrize("name", CALLS_TO_UNDO)
def test_a_call_out_of_time_is_taken_back(silent: tuple[Silent, Address], name: str) -> None:
    """C4: by the request_id that the client made for it, before the error reaches the caller."""
    stub, address = silent
    link = Link(address, Options(timeout_s=SHORT_S))
    grpc.channel_ready_future(link._channel).result(DEADLINE_S)
    with pytest.raises(DeadlineExceeded):
        link.run(CALLS_TO_UNDO[name]())
    taken, released = undone_ids(stub)
    assert taken == released
    assert all(taken)
    link.close()


@pytest.mark.parametrize("name", CALLS_TO_UNDO)
@pytest.mark.parametrize("end", ["deadline", "cancelled"])
def test_an_asyncio_call_out_of_time_or_cancelled_is_taken_back(
    silent: tuple[Silent, Address], name: str, end: str
) -> None:
    """C4: in a task of its own, which the link waits for when it is closed."""
    stub, address = silent

    async def body() -> None:
        link = await AioLink.open(address, Options(timeout_s=SHORT_S if end == "deadline" else DEADLINE_S))
        await asyncio.wait_for(link._channel.channel_ready(), DEADLINE_S)
        call: asyncio.Task[Any] = asyncio.create_task(link.run(CALLS_TO_UNDO[name]()))
        if end == "cancelled":
            await asyncio.to_thread(_wait_until_taken, stub)
            call.cancel()
        with pytest.raises(DeadlineExceeded if end == "deadline" else asyncio.CancelledError):
            await call
        await link.close()

    asyncio.run(body())
    taken, released = undone_ids(stub)
    assert taken == released


def _wait_until_taken(stub: Silent) -> None:
    stub.taken.put(stub.taken.get(timeout=DEADLINE_S))


def test_a_call_that_takes_nothing_is_not_undone(silent: tuple[Silent, Address]) -> None:
    """A commit that is out of time is repeated instead [C5]."""
    stub, address = silent
    link = Link(address, Options(timeout_s=SHORT_S))
    grpc.channel_ready_future(link._channel).result(DEADLINE_S)
    with pytest.raises(DeadlineExceeded):
        link.run(CALLS.commit([cache.CommitItem(sequence_id="e.1.2.3")]))
    link.close()
    assert stub.released.empty()
