"""Calls that cross sessions or belong to none: forks, hand-offs, pins, eviction, time, and the end of sessions."""

import pytest
from interleaving import FULL, TENANTS, encode
from keeping import Keeping
from workers import Reader, Worker

from kvharbor.pool import Fork, Prompt, Warmed
from kvharbor.pool.errors import (
    BlockHeld,
    BlockNotFound,
    HandoffNotFound,
    PinNotFound,
    RequestIdReused,
    SequenceBusy,
    WarmBudgetExceeded,
)
from kvharbor.pool.steps import finish


class Crossing(Keeping):
    """All that may happen to a pool."""

    # Copies

    def fork(self, which: int, child_count: int, reserve: int, request_id: str, group: str) -> None:
        worker, source = self.callable()[which % len(self.callable())]

        def ended(made: Fork) -> None:
            if set(made.children) <= worker.readers.keys():
                assert request_id
                assert not made.copies
                assert [view.number for view in self.pool.finish_fork(made)] == list(made.children)
                return
            children = [
                Reader(number, source.namespace, list(source.tokens), dict(source.extras), [], 0, group=group)
                for number in made.children
            ]
            worker.forks.append((made, children))

        steps = self.pool.fork(
            worker.session, source.number, child_count, reserve_tokens=reserve, request_id=request_id, group=group
        )
        self.begin(worker, steps, ended, (*FULL, RequestIdReused, SequenceBusy))

    def copying(self) -> list[Worker]:
        return [one for one in self.harbour.workers if one.running is None and one.forks]

    def end_copies(self, which: int, copy_count: int | None) -> None:
        """Ends them well, or after `copy_count` have run."""
        worker = self.copying()[which % len(self.copying())]
        made, children = worker.forks.pop()
        self.harbour.copy(made, len(made.copies) if copy_count is None else copy_count)
        if copy_count is not None:
            self.pool.abort_fork(made)
        else:
            views = self.pool.finish_fork(made)
            owner = self.pool._state.sessions.get(worker.session)
            for view, child in zip(views, children, strict=True):
                if owner is None or owner.quiet:
                    continue
                # Of a session that writes no more, the child is cut to what it shares at once.
                worker.readers[view.number] = child if worker.writes_no_more else self.harbour.reader(view, child)
                child.number = view.number
        if worker.writes_no_more:
            self.harbour.forget_private(worker)
        self.harbour.check()

    # Hand-off

    def handoff(self, which: int, new: list[int], keep: int, ttl: int) -> None:
        worker, reader = self.callable()[which % len(self.callable())]
        if worker.is_copying(reader):
            return
        self.handoff_count += 1
        token, expires_at = f"token-{self.handoff_count}", self.now + ttl
        asked = self.compute(reader, new, {}, keep=keep, names_blocks=False)

        def ended(_: None) -> None:
            del worker.readers[reader.number]
            # Time may have run out while it was on its way; then it may be gone any moment.
            if expires_at > self.now:
                self.harbour.given[token] = (worker.tenant, expires_at, reader)

        steps = self.pool.handoff(worker.session, reader.number, asked, token=token, expires_at=expires_at)
        self.begin(worker, steps, ended)

    def adopt(self, which: int, group: str) -> None:
        worker, given = self.idle()[which % len(self.idle())], self.harbour.given
        token = list(given)[which % len(given)]
        tenant, _, reader = given[token]
        if tenant != worker.tenant:
            with pytest.raises(HandoffNotFound):
                self.pool.adopt(worker.session, token)
            return
        del given[token]
        view = self.pool.adopt(worker.session, token, group=group).view
        reader.asked = None
        worker.readers[view.number] = self.harbour.reader(view, reader)
        self.harbour.check()
        with pytest.raises(HandoffNotFound):
            self.pool.adopt(worker.session, token)

    # Pins, time and eviction

    def warmup(self, which: int | None, tokens: list[int], name: str, ttl: int | None, present_only: bool) -> None:
        worker = self.idle()[which % len(self.idle())] if which is not None and self.idle() else None
        if len(tokens) < self.block_tokens or (worker is None and self.operator is not None):
            return
        tenant = "red" if worker is None else worker.tenant
        whole = tokens[: len(tokens) // self.block_tokens * self.block_tokens]

        def ended(warmed: Warmed) -> None:
            assert warmed.pinned_tokens + warmed.missing_tokens == len(whole)
            view = warmed.sequence
            if view is not None and worker is not None and view.number not in worker.readers:
                fresh = Reader(view.number, (tenant, "", "", b"", ""), list(whole), {}, [], 0)
                worker.readers[view.number] = self.harbour.reader(view, fresh)

        steps = self.pool.warmup(
            tenant,
            None if worker is None else worker.session,
            Prompt(encode(tokens)),
            name,
            expires_at=None if ttl is None else self.now + ttl,
            present_only=present_only,
        )
        self.begin(worker, steps, ended, (*FULL, WarmBudgetExceeded))

    def unwarm(self, which: int, name: str) -> None:
        self.begin(None, self.pool.unwarm(TENANTS[which % len(TENANTS)], name), refusals=(PinNotFound,))

    def evict_block(self, which: int, is_stale: bool, is_held: bool) -> None:
        """Evicts a cached block, or tries to with one that is held or that it knows by an old generation."""
        blocks = self.pool._state.blocks
        known = list(blocks.evictable)
        if is_held or not known:
            known = list(range(len(blocks.state)))
        block = known[which % len(known)]
        steps = self.pool.evict_block(block, blocks.generation[block] - is_stale)
        self.begin(None, steps, refusals=(BlockNotFound, BlockHeld))

    def evict_unheld(self) -> None:
        self.begin(None, self.pool.evict_unheld())

    def retire(self, which: int) -> None:
        self.begin(None, self.pool.retire_version(TENANTS[which % len(TENANTS)], ""))

    def lookup(self, which: int, tokens: list[int]) -> None:
        self.begin(None, self.pool.lookup(TENANTS[which % len(TENANTS)], Prompt(encode(tokens))))

    def expire(self) -> None:
        self.now += 1
        self.pool.tell_time(self.now)
        given = self.harbour.given
        for token in [token for token, (_, expires_at, _) in given.items() if expires_at <= self.now]:
            del given[token]
        self.begin(None, self.pool.expire(self.now))

    # Sessions

    def lost(self) -> list[Worker]:
        return [
            one
            for one in self.harbour.workers
            if one.is_lost and one.running is None and one.session in self.pool._state.sessions
        ]

    def lose_session(self, which: int) -> None:
        worker = self.idle()[which % len(self.idle())]
        worker.is_lost = True
        self.begin(worker, self.pool.end_session(worker.session))
        self.open_session()

    def scribble(self, which: int) -> None:
        worker = self.lost()[which % len(self.lost())]
        if not worker.writes_no_more:
            self.harbour.scribble(worker)
        self.harbour.check()

    def prove_writers_quiet(self, which: int) -> None:
        """From here on no process of it writes."""
        worker = self.lost()[which % len(self.lost())]
        worker.writes_no_more = True
        self.harbour.forget_private(worker)
        self.begin(worker, self.pool.writers_quiet(worker.session))

    def prove_quiet(self, which: int) -> None:
        """From here on no process of it reads or writes; copies of the service's own go on."""
        worker = self.lost()[which % len(self.lost())]
        expected = sum(1 for reader in worker.readers.values() if not worker.is_copying(reader))
        worker.readers.clear()
        worker.own.clear()

        def ended(count: int) -> None:
            assert count == expected

        self.begin(worker, self.pool.session_quiet(worker.session), ended)

    def end_all(self) -> None:
        """Ends what is under way, gives everything back, and finds the pool as it was at first."""
        pool, workers, state = self.pool, self.harbour.workers, self.pool._state
        while running := self.under_way():
            for worker in running:
                self.advance(worker)
        while self.copying():
            self.end_copies(0, None)
        for one in workers:
            while one.readers and not one.is_lost and one.session % 2:
                number, _ = one.readers.popitem()
                assert finish(pool.release(one.session, number)) == 1
            one.readers.clear()
            one.own.clear()
            if one.session in state.sessions:
                finish(pool.session_quiet(one.session))
        self.harbour.given.clear()
        finish(pool.expire(1e9))
        for tenant, name in list(state.pins):
            finish(pool.unwarm(tenant, name))
        finish(pool.evict_unheld())
        self.harbour.check()
        stats = pool.stats()
        assert stats.free_block_count == stats.total_block_count
        assert (stats.sequence_count, stats.pin_count, stats.warm_budget_used_block_count) == (0, 0, 0)
        assert not any(one.committed_block_count or one.sequence_count for one in stats.tenants)
        assert all(awaited.moved for awaited in self.waiting), "[W3] somebody waits for nobody"
        left = (state.namespaces, state.sessions, state.handoffs, state.pins, state.in_flight, state.ending_pins)
        flights = (state.writers.by_key, state.awaiting.by_key, state.marks.by_age, state.marks.by_session)
        assert [len(one) for one in (*left, *flights, state.blocks.canonical)] == [0] * 11
        assert state.claimed == 0
