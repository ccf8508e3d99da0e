"""What the calls of a `FakeService` do. There is no prefix cache: nothing is ever reused."""

import queue
from typing import Any

import numpy as np

from fake_process import refused_item
from kvharbor.gpumem import Layout
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import types_pb2


class FakeSequences:
    """The sequences that one process of the service knows. `refuse_resume` has those that it does not take up.

    `pool_id` is that of the pool now.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.pool_id = ""
        self.known: dict[str, types_pb2.Sequence] = {}
        self.refuse_resume: dict[str, types_pb2.ItemStatus] = {}
        self.resumes: queue.Queue[cache.ResumeRequest] = queue.Queue()
        self.resumed = True
        self._committed: dict[str, int] = {}
        self._numbers = iter(range(1, 10_000))
        self._next_block = 1

    def answer(self, method: str, request: Any) -> Any:
        """Does what a call of the CacheService asks."""
        return getattr(self, f"_{method.lower()}")(request)

    def _stats(self, request: cache.StatsRequest) -> cache.StatsResponse:
        return cache.StatsResponse(pools=[cache.PoolStats(pool_id=self.pool_id, sequence_count=len(self.known))])

    def _allocate(self, request: cache.AllocateRequest) -> cache.AllocateResponse:
        token_count = len(request.token_ids) // 4
        for known in self.known.values():
            if request.request_id and known.request_id == request.request_id:
                return cache.AllocateResponse(sequence=known)
        sequence = self._sequence(token_count, token_count + request.reserve_tokens, request.request_id)
        sequence.group = request.group
        return cache.AllocateResponse(sequence=sequence)

    def _sequence(self, token_count: int, capacity: int, request_id: str) -> types_pb2.Sequence:
        number = next(self._numbers)
        sequence = types_pb2.Sequence(
            sequence_id=f"{self.pool_id}.7.{number}", token_count=token_count, request_id=request_id
        )
        self._grow(sequence, capacity)
        self.known[sequence.sequence_id] = sequence
        return sequence

    def _grow(self, sequence: types_pb2.Sequence, capacity: int) -> None:
        have = len(sequence.table.block_ids) // 4
        need = -(-capacity // self.layout.block_tokens)
        added = np.arange(self._next_block, self._next_block + max(need - have, 0))
        self._next_block += len(added)
        sequence.table.block_ids += added.astype("<u4").tobytes()
        sequence.table.generations += np.full(len(added), 5, "<u8").tobytes()
        sequence.capacity_tokens = max(need, have) * self.layout.block_tokens

    def _extend(self, request: cache.ExtendRequest) -> cache.ExtendResponse:
        def one(item: cache.ExtendItem) -> cache.ExtendResult:
            sequence = self.known.get(item.sequence_id)
            if sequence is None:
                return cache.ExtendResult(status=refused_item("SEQUENCE_NOT_FOUND", 5))
            self._grow(sequence, item.capacity_tokens)
            added = types_pb2.BlockTable(
                block_ids=sequence.table.block_ids[4 * item.known_block_count :],
                generations=sequence.table.generations[8 * item.known_block_count :],
            )
            return cache.ExtendResult(added=added, capacity_tokens=sequence.capacity_tokens)

        return cache.ExtendResponse(results=[one(item) for item in request.items])

    def _commit(self, request: cache.CommitRequest) -> cache.CommitResponse:
        return cache.CommitResponse(results=[self._commit_one(item) for item in request.items])

    def _commit_one(self, item: cache.CommitItem) -> cache.CommitResult:
        sequence = self.known.get(item.sequence_id)
        if sequence is None:
            return cache.CommitResult(status=refused_item("SEQUENCE_NOT_FOUND", 5))
        new_count = len(item.new_token_ids) // 4
        if sequence.token_count == item.known_token_count:
            sequence.token_count += new_count
        elif sequence.token_count != item.known_token_count + new_count:
            return cache.CommitResult(status=refused_item("CURSOR_OUT_OF_RANGE", 11))
        sequence.computed_tokens = item.computed_tokens
        return cache.CommitResult(committed_tokens=self._publish(sequence))

    def _publish(self, sequence: types_pb2.Sequence) -> int:
        """Keeps, whatever becomes of the process, how much of a sequence is committed, as the ledger does."""
        committed = self._whole(sequence.computed_tokens)
        self._committed[sequence.sequence_id] = committed
        return committed

    def _whole(self, token_count: int) -> int:
        return token_count // self.layout.block_tokens * self.layout.block_tokens

    def _fork(self, request: cache.ForkRequest) -> cache.ForkResponse:
        parent = self.known[request.sequence_id]
        children = []
        for child in range(request.child_count):
            made = self._sequence(parent.token_count, parent.capacity_tokens, f"{request.request_id}/{child}")
            made.computed_tokens = made.cached_tokens = parent.computed_tokens
            children.append(made)
        return cache.ForkResponse(children=children)

    def _handoff(self, request: cache.HandoffRequest) -> cache.HandoffResponse:
        self._commit_one(request.commit)
        return cache.HandoffResponse(handoff_token=f"token of {request.commit.sequence_id}")

    def _adopt(self, request: cache.AdoptRequest) -> cache.AdoptResponse:
        sequence = self.known[request.handoff_token.removeprefix("token of ")]
        return cache.AdoptResponse(sequence=sequence, tail_token_ids=bytes(4 * sequence.token_count))

    def _unwarm(self, request: cache.UnwarmRequest) -> cache.UnwarmResponse:
        return cache.UnwarmResponse()

    def _release(self, request: cache.ReleaseRequest) -> cache.ReleaseResponse:
        for item in request.items:
            self.known.pop(item.sequence_id, None)
        return cache.ReleaseResponse(results=[cache.ReleaseResult(released_sequence_count=1) for _ in request.items])

    def _resume(self, request: cache.ResumeRequest) -> cache.ResumeResponse:
        results = []
        for held in request.sequences:
            refused = self.refuse_resume.get(held.sequence.sequence_id)
            if refused is None and held.sequence.computed_tokens < self._committed.get(held.sequence.sequence_id, 0):
                refused = refused_item("INVALID_FIELD", 3)  # [L12]
            if refused is not None:
                results.append(cache.ResumeResult(status=refused))
                continue
            self.known[held.sequence.sequence_id] = held.sequence
            results.append(cache.ResumeResult(sequence=held.sequence, committed_tokens=self._publish(held.sequence)))
        if request.complete:
            self.resumed = True
            self.resumes.put(request)
        return cache.ResumeResponse(results=results)
