"""The session's stream with nothing between: requests as they are sent, responses as they come."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from kvharbor.v1 import blocks_pb2, types_pb2
from kvharbor.v1 import stream_service_pb2 as pb
from kvharbor.v1 import stream_service_pb2_grpc as rpc
from raw_caller import BLOCK_TOKENS, DEADLINE_S, RawCaller, tokens


def block_tokens(*blocks: int) -> bytes:
    """Returns whole blocks of token ids, each block of one token only."""
    return b"".join(tokens(*[block] * BLOCK_TOKENS) for block in blocks)


def chain(*blocks: int, table_block_count: int = 0, **fields: Any) -> blocks_pb2.BlockChain:
    """Returns the contents of blocks, as `block_tokens` has them, with the room that their prompt needs."""
    return blocks_pb2.BlockChain(token_ids=block_tokens(*blocks), table_block_count=table_block_count, **fields)


def joined(*tables: types_pb2.BlockTable) -> types_pb2.BlockTable:
    """Returns the blocks of all tables."""
    return types_pb2.BlockTable(
        block_ids=b"".join(table.block_ids for table in tables),
        generations=b"".join(table.generations for table in tables),
    )


def first(table: types_pb2.BlockTable, count: int = 1) -> types_pb2.BlockTable:
    """Returns the first blocks of a table."""
    return types_pb2.BlockTable(block_ids=table.block_ids[: 4 * count], generations=table.generations[: 8 * count])


def last(table: types_pb2.BlockTable, count: int = 1) -> types_pb2.BlockTable:
    """Returns the last blocks of a table."""
    return types_pb2.BlockTable(block_ids=table.block_ids[-4 * count :], generations=table.generations[-8 * count :])


def count(table: types_pb2.BlockTable) -> int:
    """Returns how many blocks a table has."""
    return len(table.block_ids) // 4


class RawStream:
    """One stream. A thread reads it, unless `reads` is False; `unread` has what has come and nobody has asked for."""

    def __init__(self, caller: RawCaller, *, reads: bool = True) -> None:
        self._requests: queue.SimpleQueue[pb.ConverseRequest | None] = queue.SimpleQueue()
        self._number = 0
        self._arrived = threading.Condition()
        self.unread: deque[pb.ConverseResponse] = deque()
        self.failure: grpc.RpcError | None = None
        self.is_over = False
        stub = rpc.StreamServiceStub(caller.channel)
        self.call = stub.Converse(iter(self._requests.get, None), metadata=caller.metadata)
        # From then on the stream is the session's.
        self.call.initial_metadata()
        self._reader = threading.Thread(target=self._read, daemon=True)
        if reads:
            self.begin_reading()

    def begin_reading(self) -> None:
        """Reads from now on."""
        self._reader.start()

    def send(self, **call: Any) -> int:
        """Sends a request without waiting for anything; returns its number."""
        self._number += 1
        self._requests.put(pb.ConverseRequest(number=self._number, **call))
        return self._number

    def send_raw(self, request: pb.ConverseRequest) -> None:
        """Sends a request as it is."""
        self._requests.put(request)

    def half_close(self) -> None:
        """Says that no request will come any more."""
        self._requests.put(None)

    def next(self, matching: Callable[[pb.ConverseResponse], bool] = lambda _: True) -> pb.ConverseResponse:
        """Returns the next response that matches, leaving the others; fails when the stream ends before."""

        def found() -> pb.ConverseResponse | None:
            return next((response for response in self.unread if matching(response)), None)

        with self._arrived:
            assert self._arrived.wait_for(lambda: found() is not None or self.is_over, DEADLINE_S), "no response"
            response = found()
            assert response is not None, self.failure
            self.unread.remove(response)
            return response

    def answer(self, number: int) -> Any:
        """Returns the response to a request, as the call's own message."""
        response = self.next(lambda one: one.number == number and one.WhichOneof("result") != "granted")
        return getattr(response, response.WhichOneof("result") or "")

    def ask(self, **call: Any) -> Any:
        """Sends a request and returns its response."""
        return self.answer(self.send(**call))

    def granted(self, number: int) -> blocks_pb2.Granted:
        """Returns what a request has waited for."""
        return self.next(lambda one: one.number == number and one.WhichOneof("result") == "granted").granted

    def recall(self) -> blocks_pb2.Recall:
        """Returns the next recall."""
        return self.next(lambda one: one.WhichOneof("result") == "recall").recall

    def ended(self) -> grpc.RpcError | None:
        """Waits for the end of the stream; returns what it was refused with."""
        self._reader.join(DEADLINE_S)
        assert self.is_over, "the stream goes on"
        return self.failure

    def acquire(self, pool_id: str, *chains: blocks_pb2.BlockChain, **fields: Any) -> Any:
        """Acquires; returns the results, or the refusal."""
        answer = self.ask(acquire=blocks_pb2.AcquireRequest(pool_id=pool_id, chains=chains, **fields))
        return list(answer.results) if isinstance(answer, blocks_pb2.AcquireResponse) else answer

    def lease(self, pool_id: str, least: int, want: int | None = None, **fields: Any) -> Any:
        """Leases; returns the response, or the refusal."""
        return self.ask(lease=leasing(pool_id, least, want, **fields))

    def close(self) -> None:
        """Gives the stream up."""
        self.half_close()
        self.call.cancel()
        if self._reader.ident is not None:
            self._reader.join(DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _responses(self) -> Iterator[pb.ConverseResponse]:
        try:
            yield from self.call
        except grpc.RpcError as failure:
            self.failure = failure

    def _read(self) -> None:
        for response in self._responses():
            with self._arrived:
                self.unread.append(response)
                self._arrived.notify_all()
        with self._arrived:
            self.is_over = True
            self._arrived.notify_all()


def leasing(pool_id: str, least: int, want: int | None = None, **fields: Any) -> blocks_pb2.LeaseRequest:
    """Returns the request for fresh blocks: `want`, or as many as `least`."""
    return blocks_pb2.LeaseRequest(
        pool_id=pool_id, least_block_count=least, want_block_count=max(least, 1) if want is None else want, **fields
    )


def committing(pool_id: str, blocks: types_pb2.BlockTable, *contents: int, **fields: Any) -> Any:
    """Returns the request to commit blocks with contents as `block_tokens` has them."""
    item = blocks_pb2.CommitChain(blocks=blocks, token_ids=block_tokens(*contents), **fields)
    return blocks_pb2.CommitBlocksRequest(pool_id=pool_id, chains=[item])


def releasing(pool_id: str, *tables: types_pb2.BlockTable) -> blocks_pb2.ReleaseBlocksRequest:
    """Returns the request to end holds."""
    return blocks_pb2.ReleaseBlocksRequest(pool_id=pool_id, blocks=joined(*tables))
