"""Operations under way and the calls on sequences, so that any slice of any session may be the next to run."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from workers import Harbour, Reader, Running, Worker, extra_keys

from kvharbor.pool import (
    Awaited,
    Commit,
    Committed,
    Extension,
    Ledger,
    Outlook,
    Pool,
    PoolConfig,
    Prompt,
    SequenceView,
)
from kvharbor.pool.errors import PoolExhausted, RequestIdReused, RequestTooLarge, SequenceBusy
from kvharbor.pool.steps import Steps, finish

TENANTS = ("red", "red", "blue")
FULL = (PoolExhausted, RequestTooLarge)


def encode(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def is_matching(steps: Any) -> bool:
    """Whether an Allocate is still in its match, where its caller may go away."""
    while steps.gi_yieldfrom is not None:
        steps = steps.gi_yieldfrom
    return bool(steps.gi_code.co_name == "hold_match")


class Interleaving:
    """Sessions, each with at most one operation under way, and an operator with another."""

    def __init__(self, config: PoolConfig, ledger: Ledger | None = None) -> None:
        self.harbour = Harbour(Pool(config, ledger))
        self.pool = self.harbour.pool
        self.block_tokens = config.block_tokens
        self.now = 0.0
        self.session_count = self.handoff_count = 0
        self.operator: Running | None = None
        self.waiting: list[Awaited] = []
        for _ in TENANTS:
            self.open_session()

    def open_session(self) -> None:
        tenant = TENANTS[self.session_count % len(TENANTS)]
        self.session_count += 1
        self.pool.open_session(self.session_count, tenant)
        self.harbour.workers.append(Worker(self.session_count, tenant))

    # Driving

    def begin(
        self,
        worker: Worker | None,
        steps: Steps[Any],
        ended: Callable[[Any], None] = lambda _: None,
        refusals: tuple[type[Exception], ...] = (),
    ) -> None:
        """Runs the first slice of an operation of a session, or of the operator."""
        running = Running(steps, ended, refusals)
        if worker is None:
            self.operator = running
        else:
            worker.running = running
        self.advance(worker)

    def advance(self, worker: Worker | None) -> None:
        running = self.operator if worker is None else worker.running
        assert running is not None
        is_over = True
        try:
            next(running.steps)
            is_over = False
        except StopIteration as stop:
            running.ended(stop.value)
        except running.refusals as refused:
            if isinstance(refused, PoolExhausted):
                attributes = refused.attributes
                assert int(str(attributes["needed_block_count"])) > int(str(attributes["available_block_count"]))
        if is_over and worker is None:
            self.operator = None
        elif is_over and worker is not None:
            worker.running = None
        self.harbour.check()
        if not self.under_way():
            stats = self.pool.stats()
            assert stats.warm_budget_used_block_count <= stats.warm_budget_block_count

    def under_way(self) -> list[Worker | None]:
        found: list[Worker | None] = [one for one in self.harbour.workers if one.running is not None]
        return found if self.operator is None else [*found, None]

    def matching(self) -> list[Worker]:
        return [one for one in self.harbour.workers if one.running and is_matching(one.running.steps)]

    def idle(self) -> list[Worker]:
        """Sessions that may make a call."""
        return [one for one in self.harbour.workers if not one.is_lost and one.running is None]

    def callable(self) -> list[tuple[Worker, Reader]]:
        """Sequences of sessions that may make a call."""
        return [(worker, reader) for worker in self.idle() for reader in worker.readers.values()]

    def run_a_slice(self, which: int) -> None:
        running = self.under_way()
        self.advance(running[which % len(running)])

    def leave_during_the_match(self, which: int) -> None:
        running = self.matching()
        worker = running[which % len(running)]
        assert worker.running is not None
        worker.running.steps.close()
        worker.running = None
        self.harbour.check()

    # Sequences

    def publish(self, which: int, tokens: list[int], reserve: int, releases: bool) -> None:
        """A whole prefill without interruption, so that there is something to share."""
        worker = self.idle()[which % len(self.idle())]
        try:
            view = finish(self.pool.allocate(worker.session, Prompt(encode(tokens)), reserve_tokens=reserve))
        except FULL:
            return
        reader = Reader(view.number, (worker.tenant, "", "", b"", ""), list(tokens), {}, [], 0)
        self.harbour.reader(view, reader)
        asked = self.compute(reader, [], {}, keep=0, names_blocks=True)
        self.take_shadows(reader, finish(self.pool.commit(worker.session, view.number, asked)))
        if releases:
            assert finish(self.pool.release(worker.session, view.number)) == 1
        else:
            worker.readers[view.number] = reader
        self.harbour.check()

    def allocate(
        self,
        which: int,
        tokens: list[int],
        extras: dict[int, bytes],
        reserve: int,
        most: int | None,
        salt: bytes,
        request_id: str,
        group: str,
        waits: bool = False,
    ) -> None:
        worker = self.idle()[which % len(self.idle())]
        extras = {offset: value for offset, value in extras.items() if offset < len(tokens)}
        most = None if most is None else min(most, len(tokens))
        asked = (tokens, extras, reserve, most, salt, group)
        known = next((one for one in worker.readers.values() if request_id and one.request_id == request_id), None)

        def ended(view: SequenceView | Awaited) -> None:
            if isinstance(view, Awaited):
                self.waiting.append(view)
                return
            if known is not None:
                assert known.asked == asked, "[G4] another request was taken for a retry"
                assert (view.number, list(view.block_ids)) == (known.number, known.table)
                return
            namespace = (worker.tenant, "", "", salt, "")
            fresh = Reader(view.number, namespace, list(tokens), dict(extras), [], 0, asked=asked)
            assert view.cached_tokens <= (len(tokens) - 1 if most is None else most)
            worker.readers[view.number] = self.harbour.reader(view, fresh)

        steps = (self.pool.allocate_unless_pending if waits else self.pool.allocate)(
            worker.session,
            Prompt(encode(tokens), extra_keys(extras), salt=salt),
            reserve_tokens=reserve,
            max_cached_tokens=most,
            request_id=request_id,
            group=group,
        )
        self.begin(worker, steps, ended, (*FULL, RequestIdReused))

    def look_again(self, which: int, stays: bool) -> None:
        """A waiter looks again, whether it was told to or not, or leaves."""
        awaited = self.waiting.pop(which % len(self.waiting))
        if not stays:
            self.pool.stop_waiting(awaited)
        elif self.pool.look_again(awaited) is Outlook.PENDING:
            self.waiting.append(awaited)
        self.harbour.check()

    def extend(self, which: int, more: int) -> None:
        worker, reader = self.callable()[which % len(self.callable())]

        def ended(extension: Extension) -> None:
            reader.table += extension.block_ids
            assert extension.capacity_tokens == len(reader.table) * self.block_tokens
            ages = [self.pool._state.blocks.generation[block] for block in extension.block_ids]
            assert list(extension.generations) == ages

        steps = self.pool.extend(worker.session, reader.number, len(reader.tokens) + more)
        self.begin(worker, steps, ended, FULL)

    def compute_and_commit(
        self, which: int, new: list[int], extras: dict[int, bytes], keep: int, names_blocks: bool
    ) -> None:
        worker, reader = self.callable()[which % len(self.callable())]
        if worker.is_copying(reader):
            with pytest.raises(SequenceBusy):
                finish(self.pool.commit(worker.session, reader.number, Commit(reader.computed)))
            return
        asked = self.compute(reader, new, extras, keep=keep, names_blocks=names_blocks)
        steps = self.pool.commit(worker.session, reader.number, asked)
        self.begin(worker, steps, lambda done: self.take_shadows(reader, done))

    def compute(
        self, reader: Reader, new: list[int], extras: dict[int, bytes], *, keep: int, names_blocks: bool
    ) -> Commit:
        """Writes as a worker does, all but `keep` tokens, and returns the commit that says so."""
        first, before, size = len(reader.tokens), reader.computed, self.block_tokens
        new = new[: len(reader.table) * size - first]
        reader.tokens += new
        reader.extras |= {first + offset: value for offset, value in extras.items() if offset < len(new)}
        reader.computed = max(before, len(reader.tokens) - keep)
        self.harbour.write(reader, before)
        written = None
        if names_blocks:
            blocks = reader.table[before // size : -(-reader.computed // size)] if reader.computed > before else []
            ages = [self.pool._state.blocks.generation[block] for block in blocks]
            written = (array("I", blocks), array("Q", ages))
        return Commit(reader.computed, encode(new), extra_keys(reader.extras, first) if new else (), written)

    def take_shadows(self, reader: Reader, done: Committed) -> None:
        assert done.committed_tokens <= reader.computed
        for shadow in done.shadows:
            assert self.pool._state.blocks.generation[shadow.block_id] == shadow.generation
            reader.shadows[shadow.position] = shadow.block_id

    def shadowed(self) -> list[tuple[Worker, Reader]]:
        return [(one, reader) for one, reader in self.callable() if reader.shadows and not one.is_copying(reader)]

    def switch_shadows(self, which: int) -> None:
        worker, reader = self.shadowed()[which % len(self.shadowed())]
        positions = tuple(reader.shadows)
        for position in positions:
            reader.table[position] = reader.shadows.pop(position)
        asked = Commit(reader.computed, switched=positions)
        # The reply may name blocks that an earlier commit had to leave for later.
        steps = self.pool.commit(worker.session, reader.number, asked)
        self.begin(worker, steps, lambda done: self.take_shadows(reader, done))

    def release(self, which: int, how: str) -> None:
        worker, reader = self.callable()[which % len(self.callable())]
        session, ending = worker.session, [reader]
        steps = self.pool.release(session, reader.number)
        copying = {made.source for made, _ in worker.forks}
        if how == "request" and reader.request_id:
            steps = self.pool.release_request(session, reader.request_id)
        elif how == "group" and reader.group:
            steps = self.pool.release_group(session, reader.group)
            ending = [one for one in worker.readers.values() if one.group == reader.group]
            unborn = [child for _, children in worker.forks for child in children if child.group == reader.group]
            copying.update(child.number for child in unborn)
            ending += unborn
        if copying & {one.number for one in ending}:
            with pytest.raises(SequenceBusy):
                finish(steps)
            return
        for one in ending:
            del worker.readers[one.number]

        def ended(count: int) -> None:
            assert count == len(ending)
            assert finish(self.pool.release(session, reader.number)) == 0

        self.begin(worker, steps, ended)
