"""The loop that advances streams: admission, one step for all, commit, fork, preemption, release."""

import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from torch import Tensor

from kvharbor.client import EpochEnded, Namespace, Pool, PoolExhausted, RequestTooLarge, SequenceLost
from kvharbor.engines.transformers.forward import PoolModel
from kvharbor.engines.transformers.stream import Stream

NO_NAMESPACE = Namespace()


@dataclass(frozen=True, slots=True)
class Admission:
    """How prompts enter the pool: the namespace they share prefixes in, and how long to wait for room.

    `max_cached_tokens` bounds reuse; 0 computes everything. One token is always computed, for its logits.
    """

    namespace: Namespace = NO_NAMESPACE
    max_cached_tokens: int | None = None
    wait_s: float = 0.0


class Batch:
    """Runs streams to their ends. All that run share each step; one at a time is in its prompt.

    Prompts enter one after another, each when the one before has committed its own, so that a common
    beginning is computed once even when they arrive together. When the pool is full the newest stream gives
    its blocks back and waits; the oldest always goes on. A stream whose sequence is lost, alone or with all that was
    in the pool, begins again with the tokens it has [E9]. `at_work` is entered while the pool's memory is touched.
    """

    def __init__(
        self,
        model: PoolModel,
        pool: Pool,
        *,
        admission: Admission,
        chunk_tokens: int,
        at_work: AbstractContextManager[object],
    ) -> None:
        self._model = model
        self._pool = pool
        self._at_work = at_work
        self._admission = admission
        self._block_tokens = pool.block_tokens
        self._chunk_tokens = chunk_tokens
        self._waiting: deque[Stream] = deque()
        self._running: list[Stream] = []
        self._full = False

    def run(self, streams: Iterable[Stream]) -> None:
        """Returns when all streams are finished; releases every sequence, also on an error.

        Raises PoolExhausted when a stream does not fit although no other of this batch runs.
        """
        self._waiting.extend(streams)
        try:
            while self._waiting or self._running:
                try:
                    self._admit()
                    self._make_room()
                    self._step()
                except (EpochEnded, SequenceLost):
                    self._begin_again()
        finally:
            self._stop_all()

    def _begin_again(self) -> None:
        lost = [stream for stream in self._running if stream.sequence.ended]
        self._running = [stream for stream in self._running if not stream.sequence.ended]
        self._waiting.extendleft(stream for stream in reversed(lost) if stream.lose())
        self._full = False

    def _admit(self) -> None:
        in_prompt = any(stream.pending_tokens > 1 for stream in self._running)
        if not self._waiting or in_prompt or self._full:
            return
        stream = self._waiting[0]
        if stream.sequence is None:
            try:
                self._allocate(stream)
            except PoolExhausted:
                if not self._running:
                    raise
                self._full = True
                return
        self._running.append(self._waiting.popleft())

    def _allocate(self, stream: Stream) -> None:
        stream.started_s = stream.started_s or time.monotonic()
        most = len(stream.token_ids) - 1
        limit = self._admission.max_cached_tokens
        sequence = self._pool.allocate(
            stream.token_ids,
            max_cached_tokens=most if limit is None else min(limit, most),
            namespace=self._admission.namespace,
            # Answers that run here would stand still during a wait, and may be what it waits for.
            wait_s=0.0 if self._running else self._admission.wait_s,
        )
        stream.start(sequence)

    def _make_room(self) -> None:
        """Extends by a block each sequence that is full; the prompt's blocks came with Allocate."""
        for stream in list(self._running):
            while stream.sequence is not None and stream.sequence.capacity_tokens <= stream.computed_tokens:
                try:
                    stream.sequence.extend(self._block_tokens)
                except PoolExhausted:
                    self._preempt()

    def _preempt(self) -> None:
        newest = self._running.pop()
        newest.stop()
        self._waiting.appendleft(newest)
        # With others running, trying again before one of them ends would fail again.
        self._full = bool(self._running)

    def _step(self) -> None:
        if not self._running:
            return
        running = list(self._running)
        rows = [stream.next_row(self._chunk_tokens) for stream in running]
        with self._at_work, self._pool.blocks.computing:
            for stream in running:
                stream.sequence.require_held()
            step = self._model.logits(rows)
        for stream, row, logits in zip(running, rows, step, strict=True):
            self._advance(stream, row.end, logits)

    def _advance(self, stream: Stream, computed_tokens: int, logits: Tensor) -> None:
        stream.advance(computed_tokens, logits)
        if stream.forks and stream.answer:
            self._fork(stream, logits)
        if stream.finished:
            stream.finish(self._block_tokens)
            self._running.remove(stream)
            self._full = False
        elif stream.has_full_block(self._block_tokens):
            stream.commit()

    def _fork(self, stream: Stream, logits: Tensor) -> None:
        forks, stream.forks = stream.forks, []
        try:
            # What is committed is shared; only the tail of the prompt is copied.
            stream.commit()
            children = stream.sequence.fork(len(forks))
        except (PoolExhausted, RequestTooLarge, EpochEnded, SequenceLost):
            # They can still be answered one after another: each finds the prompt in the pool.
            self._waiting.extendleft(reversed(forks))
            return
        for fork, child in zip(forks, children, strict=True):
            fork.start(child)
            self._running.append(fork)
        for fork in forks:
            self._advance(fork, stream.computed_tokens, logits)

    def _stop_all(self) -> None:
        with ExitStack() as stack:
            for stream in (*self._running, *self._waiting):
                stack.callback(stream.stop)
        self._running.clear()
        self._waiting.clear()
