"""The stream of a `FakeService`: block calls, and commits and releases of its sequences, in order.

Contents are known by opaque keys or tokens, as they are given; nothing is ever evicted, and room is `free_count`.
"""

import queue
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from fake_calls import FakeSequences
from fake_process import refused_item
from kvharbor.v1 import blocks_pb2, types_pb2
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import stream_service_pb2 as stream_pb2

KEY_BYTES = 32
Block = tuple[int, int]


def table(*blocks: Block) -> types_pb2.BlockTable:
    """Returns blocks as a message."""
    return types_pb2.BlockTable(
        block_ids=array("I", [block for block, _ in blocks]).tobytes(),
        generations=array("Q", [generation for _, generation in blocks]).tobytes(),
    )


def blocks_of(message: types_pb2.BlockTable) -> list[Block]:
    """Reads a message."""
    return list(zip(array("I", message.block_ids), array("Q", message.generations), strict=True))


class FakeBlocks:
    """The blocks that the session holds by itself, and every request that was served, by its kind.

    `before` and `after` have what is run before a kind takes effect, and before its response leaves. `kept` is what the
    ledger says to be the session's.
    """

    def __init__(self, sequences: FakeSequences, first_block: int) -> None:
        self.sequences = sequences
        self.free_count = 20
        self.own: set[Block] = set()
        self.kept: set[Block] = set()
        self.content: dict[bytes, Block] = {}
        self.requests: list[stream_pb2.ConverseRequest] = []
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}
        self.waits = False
        self.versions: list[str] = []
        self._next_block = first_block
        self._responses: queue.Queue[stream_pb2.ConverseResponse | None] = queue.Queue()
        self.opened = threading.Event()
        self._serving = threading.Lock()

    def of_kind(self, kind: str) -> list[Any]:
        """The requests of a kind that have come so far."""
        return [getattr(request, kind) for request in [*self.requests] if request.WhichOneof("call") == kind]

    def push(self, response: stream_pb2.ConverseResponse) -> None:
        """Sends what answers nothing, or comes later."""
        self._responses.put(response)

    def grant(self, number: int, result: blocks_pb2.AcquireResult) -> None:
        """Grants what request `number` waits for."""
        self.push(stream_pb2.ConverseResponse(number=number, granted=blocks_pb2.Granted(result=result)))

    def recall(self, block_count: int) -> None:
        """Asks for so many blocks of the pool back."""
        notice = blocks_pb2.Recall(pool_id=self.sequences.pool_id, block_count=block_count)
        self.push(stream_pb2.ConverseResponse(recall=notice))

    def break_off(self) -> None:
        """Ends the stream, and nothing else."""
        self._responses.put(None)

    def forget(self) -> None:
        """Ends with the process."""
        with self._serving:
            self.kept |= self.own
            self.own = set()
            self.opened.clear()

    def resume(self, request: cache.ResumeRequest) -> types_pb2.BlockTable:
        """Takes up what is named and kept; returns what is not."""
        named = blocks_of(request.blocks)
        self.own |= {block for block in named if block in self.kept}
        if request.HasField("version"):
            self.versions.append(request.version)
        return table(*(block for block in named if block not in self.kept))

    def converse(self, requests: Iterator[Any], is_over: Callable[[], bool]) -> Iterator[stream_pb2.ConverseResponse]:
        """Serves a stream until it ends; what is answered when `is_over` is lost."""
        responses: queue.Queue[stream_pb2.ConverseResponse | None] = queue.Queue()
        self._responses = responses
        self.opened.set()

        def read() -> None:
            try:
                for request in requests:
                    self.requests.append(request)
                    kind = request.WhichOneof("call")
                    self.before.get(kind, _nothing)()
                    with self._serving:
                        if is_over():
                            return
                        response = self._answered(request, kind)
                    self.after.get(kind, _nothing)()
                    if is_over():
                        return
                    responses.put(response)
            except grpc.RpcError:  # broken off
                pass
            except Exception as broken:  # how gRPC ends the iterator of a call that is over
                if type(broken) is not Exception:
                    raise
            finally:
                responses.put(None)

        threading.Thread(target=read).start()
        while (response := responses.get()) is not None:
            yield response

    def _answered(self, request: stream_pb2.ConverseRequest, kind: str) -> stream_pb2.ConverseResponse:
        call = getattr(request, kind)
        response = stream_pb2.ConverseResponse(number=request.number)
        stale = getattr(call, "pool_id", self.sequences.pool_id) != self.sequences.pool_id
        answer = refused_item("STALE_EPOCH", 9) if stale else getattr(self, f"_{kind}")(call)
        if isinstance(answer, types_pb2.ItemStatus):
            response.refusal.CopyFrom(answer)
        else:
            getattr(response, kind).CopyFrom(answer)
        return response

    def _leased(self, count: int) -> list[Block]:
        blocks = [(self._next_block + index, 1) for index in range(count)]
        self._next_block += count
        self.free_count -= count
        self.own |= {*blocks}
        return blocks

    def _acquire(self, request: blocks_pb2.AcquireRequest) -> blocks_pb2.AcquireResponse:
        return blocks_pb2.AcquireResponse(results=[self._acquire_one(chain) for chain in request.chains])

    def _acquire_one(self, chain: blocks_pb2.BlockChain) -> blocks_pb2.AcquireResult:
        held = []
        for end in range(KEY_BYTES, len(chain.keys) + 1, KEY_BYTES):
            block = self.content.get(chain.keys[end - KEY_BYTES : end])
            if block is None:
                break
            held.append(block)
        missing = max(chain.table_block_count - len(held), 0)
        if missing > self.free_count:
            return blocks_pb2.AcquireResult(status=refused_item("POOL_EXHAUSTED", 8), waiting=self.waits)
        self.own |= {*held}
        return blocks_pb2.AcquireResult(held=table(*held), leased=table(*self._leased(missing)))

    def _lease(self, request: blocks_pb2.LeaseRequest) -> Any:
        if request.least_block_count > self.free_count:
            return blocks_pb2.LeaseResponse(waiting=True) if self.waits else refused_item("POOL_EXHAUSTED", 8)
        count = min(request.want_block_count, self.free_count)
        return blocks_pb2.LeaseResponse(leased=table(*self._leased(count)))

    def _commit_blocks(self, request: blocks_pb2.CommitBlocksRequest) -> blocks_pb2.CommitBlocksResponse:
        return blocks_pb2.CommitBlocksResponse(results=[self._commit_chain(chain) for chain in request.chains])

    def _commit_chain(self, chain: blocks_pb2.CommitChain) -> blocks_pb2.CommitChainResult:
        blocks = blocks_of(chain.blocks)
        if not self.own.issuperset([*blocks, *blocks_of(chain.parent)]):
            return blocks_pb2.CommitChainResult(status=refused_item("BLOCK_NOT_HELD", 9))
        for index, block in enumerate(blocks):
            self.content.setdefault(chain.keys[index * KEY_BYTES :][:KEY_BYTES], block)
        return blocks_pb2.CommitChainResult()

    def _release_blocks(self, request: blocks_pb2.ReleaseBlocksRequest) -> blocks_pb2.ReleaseBlocksResponse:
        released = self.own & {*blocks_of(request.blocks)}
        self.own -= released
        self.free_count += len(released)
        return blocks_pb2.ReleaseBlocksResponse(released_block_count=len(released))

    def _invalidate_blocks(self, request: blocks_pb2.InvalidateBlocksRequest) -> blocks_pb2.InvalidateBlocksResponse:
        before = blocks_of(request.blocks)
        leased = [(block, generation + 1) for block, generation in before]
        self.own = (self.own - {*before}) | {*leased}
        return blocks_pb2.InvalidateBlocksResponse(
            statuses=[types_pb2.ItemStatus() for _ in before], leased=table(*leased), invalidated=table(*before)
        )

    def _bump_namespace(self, request: blocks_pb2.BumpNamespaceRequest) -> blocks_pb2.BumpNamespaceResponse:
        self.versions.append(request.version)
        return blocks_pb2.BumpNamespaceResponse(version=request.version or "fresh")

    def _cancel_wait(self, request: blocks_pb2.CancelWaitRequest) -> blocks_pb2.CancelWaitResponse:
        return blocks_pb2.CancelWaitResponse(cancelled=True)

    def _computing(self, request: blocks_pb2.ComputingRequest) -> blocks_pb2.ComputingResponse:
        return blocks_pb2.ComputingResponse()

    def _abandon(self, request: blocks_pb2.AbandonRequest) -> blocks_pb2.AbandonResponse:
        return blocks_pb2.AbandonResponse(statuses=[types_pb2.ItemStatus() for _ in request.chains])

    def _commit(self, request: cache.CommitRequest) -> cache.CommitResponse:
        answer: cache.CommitResponse = self.sequences.answer("Commit", request)
        for item, result in zip(request.items, answer.results, strict=True):
            sequence = self.sequences.known.get(item.sequence_id)
            if sequence is not None and not result.status.code:
                known = blocks_of(sequence.table)
                sequence.table.CopyFrom(table(*known, *(new for new in blocks_of(item.appended) if new not in known)))
                self.own -= {*blocks_of(item.appended)}
        return answer

    def _release(self, request: cache.ReleaseRequest) -> cache.ReleaseResponse:
        answer: cache.ReleaseResponse = self.sequences.answer("Release", request)
        return answer


def _nothing() -> None:
    pass
