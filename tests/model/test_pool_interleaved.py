"""Operations of several sessions run slice by slice, in any order, while every promise is checked after each."""

import os
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from workers import Harbour, Reader, Running, Worker, extra_keys

from kvharbor.pool import Commit, Committed, Extension, Fork, Pool, PoolConfig, Prompt, SequenceView, Warmed
from kvharbor.pool.errors import (
    BlockHeld,
    BlockNotFound,
    HandoffNotFound,
    PinNotFound,
    PoolExhausted,
    RequestIdReused,
    RequestTooLarge,
    SequenceBusy,
    WarmBudgetExceeded,
)
from kvharbor.pool.steps import Steps, finish

BLOCKS, BLOCK_TOKENS, SCRATCH = 14, 2, 1
TENANTS = ("red", "red", "blue", "red")
ANY = st.integers(0, 11)
# Mostly the same token, so that most prompts share a prefix.
TOKEN = st.sampled_from([1, 1, 1, 1, 2])
TOKENS = st.lists(TOKEN, min_size=1, max_size=11)
NEW_TOKENS = st.lists(TOKEN, max_size=4)
EXTRAS: st.SearchStrategy[dict[int, bytes]] = st.sampled_from([{}, {}, {}, {2: b"i"}, {0: b"i", 3: b"j"}])
NAMES = st.sampled_from(["x", "y"])
FULL = (PoolExhausted, RequestTooLarge)


def encode(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def can_pick(machine: "InterleavedMachine") -> bool:
    return machine.pick(0) is not None


def now_and_then(machine: "InterleavedMachine") -> bool:
    """Keeps what takes state away rarer than what builds it up."""
    machine.step_count += 1
    return machine.step_count % 4 == 0


def is_matching(steps: Any) -> bool:
    """Whether an Allocate is still in its match, where its caller may go away."""
    while steps.gi_yieldfrom is not None:
        steps = steps.gi_yieldfrom
    return bool(steps.gi_code.co_name == "hold_match")


class InterleavedMachine(RuleBasedStateMachine):
    """[G1] to [G5] and [P1] to [P7] between any two slices of several sessions' operations."""

    @initialize(slice_blocks=st.integers(1, 2), min_reuse=st.sampled_from([0, 0, 4]))
    def start(self, slice_blocks: int, min_reuse: int) -> None:
        config = PoolConfig(
            BLOCKS,
            BLOCK_TOKENS,
            scratch_blocks=SCRATCH,
            min_reuse_tokens=min_reuse,
            warm_budget_ratio=0.5,
            slice_blocks=slice_blocks,
        )
        self.harbour = Harbour(Pool(config))
        self.pool = self.harbour.pool
        self.now = 0.0
        self.session_count = self.token_count = self.step_count = 0
        self.operator: Running | None = None
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
        kind: str,
        steps: Steps[Any],
        ended: Callable[[Any], None] = lambda _: None,
        refusals: tuple[type[Exception], ...] = (),
    ) -> None:
        running = Running(kind, steps, ended, refusals)
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

    def idle(self, which: int) -> Worker | None:
        """Picks a session that may make a call."""
        found = [one for one in self.harbour.workers if not one.is_lost and one.running is None]
        return found[which % len(found)] if found else None

    def pick(self, which: int) -> tuple[Worker, Reader] | None:
        """Picks a sequence of a session that may make a call."""
        found = [
            (one, reader)
            for one in self.harbour.workers
            if not one.is_lost and one.running is None
            for reader in one.readers.values()
        ]
        return found[which % len(found)] if found else None

    @precondition(lambda self: self.operator is not None or any(one.running for one in self.harbour.workers))
    @rule(which=ANY)
    def run_a_slice(self, which: int) -> None:
        running: list[Worker | None] = [one for one in self.harbour.workers if one.running is not None]
        if self.operator is not None:
            running.append(None)
        if running:
            self.advance(running[which % len(running)])

    @precondition(lambda self: any(one.running and is_matching(one.running.steps) for one in self.harbour.workers))
    @rule(which=ANY)
    def caller_goes_away_during_the_match(self, which: int) -> None:
        running = [one for one in self.harbour.workers if one.running and is_matching(one.running.steps)]
        if running:
            worker = running[which % len(running)]
            assert worker.running is not None
            worker.running.steps.close()
            worker.running = None
            self.harbour.check()

    # Sequences

    @rule(which=ANY, tokens=TOKENS, reserve=st.integers(0, 4), releases=st.booleans())
    def publish(self, which: int, tokens: list[int], reserve: int, releases: bool) -> None:
        """A whole prefill without interruption, so that there is something to share."""
        if (worker := self.idle(which)) is None:
            return
        try:
            view = finish(self.pool.allocate(worker.session, Prompt(encode(tokens)), reserve_tokens=reserve))
        except FULL:
            return
        reader = Reader(view.number, (worker.tenant, "", "", b""), list(tokens), {}, [], 0)
        self.harbour.reader(view, reader)
        done = finish(self.pool.commit(worker.session, view.number, self.compute(reader, [], {}, 0, True)))
        reader.shadows.update({one.position: one.block_id for one in done.shadows})
        if releases:
            assert finish(self.pool.release(worker.session, view.number)) == 1
        else:
            worker.readers[view.number] = reader
        self.harbour.check()

    @rule(
        which=ANY,
        tokens=TOKENS,
        extras=EXTRAS,
        reserve=st.integers(0, 4),
        most=st.one_of(st.none(), st.integers(0, 11)),
        salt=st.sampled_from([b"", b"", b"s"]),
        request_id=st.sampled_from(["", "", "a", "f/0", "f/1"]),
        group=st.sampled_from(["", "g"]),
    )
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
    ) -> None:
        worker = self.idle(which)
        if worker is None:
            return
        extras = {offset: value for offset, value in extras.items() if offset < len(tokens)}
        most = None if most is None else min(most, len(tokens))
        asked = (tuple(tokens), tuple(sorted(extras.items())), reserve, most, salt, group)
        known = next((one for one in worker.readers.values() if request_id and one.request_id == request_id), None)

        def ended(view: SequenceView) -> None:
            if known is not None:
                assert known.asked == asked, "[G4] another request was taken for a retry"
                assert (view.number, list(view.block_ids)) == (known.number, known.table)
                return
            namespace = (worker.tenant, "", "", salt)
            fresh = Reader(view.number, namespace, list(tokens), dict(extras), [], 0, asked=asked)
            assert view.cached_tokens <= (len(tokens) - 1 if most is None else most)
            worker.readers[view.number] = self.harbour.reader(view, fresh)

        self.begin(
            worker,
            "allocate",
            self.pool.allocate(
                worker.session,
                Prompt(encode(tokens), extra_keys(extras), salt=salt),
                reserve_tokens=reserve,
                max_cached_tokens=most,
                request_id=request_id,
                group=group,
            ),
            ended,
            (*FULL, RequestIdReused),
        )

    @precondition(can_pick)
    @rule(which=ANY, more=st.integers(0, 6))
    def extend(self, which: int, more: int) -> None:
        if (picked := self.pick(which)) is None:
            return
        worker, reader = picked

        def ended(extension: Extension) -> None:
            reader.table += extension.block_ids
            assert extension.capacity_tokens == len(reader.table) * BLOCK_TOKENS

        steps = self.pool.extend(worker.session, reader.number, len(reader.tokens) + more)
        self.begin(worker, "extend", steps, ended, FULL)

    @precondition(can_pick)
    @rule(which=ANY, new=NEW_TOKENS, extras=EXTRAS, keep=st.integers(0, 3), names_blocks=st.booleans())
    def compute_and_commit(
        self, which: int, new: list[int], extras: dict[int, bytes], keep: int, names_blocks: bool
    ) -> None:
        if (picked := self.pick(which)) is None:
            return
        worker, reader = picked
        if worker.is_copying(reader):
            with pytest.raises(SequenceBusy):
                finish(self.pool.commit(worker.session, reader.number, Commit(reader.computed)))
            return
        asked = self.compute(reader, new, extras, keep, names_blocks)

        def ended(done: Committed) -> None:
            assert done.committed_tokens <= reader.computed
            for shadow in done.shadows:
                assert self.pool._state.blocks.generation[shadow.block_id] == shadow.generation
                reader.shadows[shadow.position] = shadow.block_id

        self.begin(worker, "commit", self.pool.commit(worker.session, reader.number, asked), ended)

    def compute(
        self, reader: Reader, new: list[int], extras: dict[int, bytes], keep: int, names_blocks: bool
    ) -> Commit:
        """Writes as a worker does, and returns the commit that says so."""
        first, before = len(reader.tokens), reader.computed
        new = new[: len(reader.table) * BLOCK_TOKENS - first]
        reader.tokens += new
        reader.extras |= {first + offset: value for offset, value in extras.items() if offset < len(new)}
        reader.computed = max(before, len(reader.tokens) - keep)
        self.harbour.write(reader, before)
        written = None
        if names_blocks:
            begin, end = before // BLOCK_TOKENS, -(-reader.computed // BLOCK_TOKENS)
            blocks = reader.table[begin:end] if reader.computed > before else []
            ages = [self.pool._state.blocks.generation[block] for block in blocks]
            written = (array("I", blocks), array("Q", ages))
        return Commit(reader.computed, encode(new), extra_keys(reader.extras, first) if new else (), written)

    @precondition(can_pick)
    @rule(which=ANY)
    def switch_shadows(self, which: int) -> None:
        if (picked := self.pick(which)) is None or picked[0].is_copying(picked[1]):
            return
        worker, reader = picked
        positions = tuple(reader.shadows)
        for position in positions:
            reader.table[position] = reader.shadows.pop(position)
        asked = Commit(reader.computed, switched=positions)
        # The reply may name blocks that an earlier commit had to leave for later.
        self.begin(
            worker,
            "switch",
            self.pool.commit(worker.session, reader.number, asked),
            lambda done: reader.shadows.update({one.position: one.block_id for one in done.shadows}),
        )

    @precondition(can_pick)
    @rule(which=ANY, how=st.sampled_from(["number", "request", "group"]))
    def release(self, which: int, how: str) -> None:
        if (picked := self.pick(which)) is None:
            return
        worker, reader = picked
        session = worker.session
        ending = [reader]
        steps = self.pool.release(session, reader.number)
        if how == "request" and reader.request_id:
            steps = self.pool.release_request(session, reader.request_id)
        elif how == "group" and reader.group:
            ending = [one for one in worker.readers.values() if one.group == reader.group]
            steps = self.pool.release_group(session, reader.group)
        copying = {number for made, _ in worker.forks for number in (made.source, *made.children)}
        groups = {child.group for _, children in worker.forks for child in children}
        if copying & {one.number for one in ending} or (len(ending) > 1 or how == "group") and reader.group in groups:
            with pytest.raises(SequenceBusy):
                finish(steps)
            return
        for one in ending:
            del worker.readers[one.number]

        def ended(count: int) -> None:
            assert count == len(ending)
            assert finish(self.pool.release(session, reader.number)) == 0

        self.begin(worker, "release", steps, ended)

    # Copies

    @precondition(can_pick)
    @rule(
        which=ANY,
        child_count=st.integers(1, 3),
        reserve=st.integers(0, 3),
        request_id=st.sampled_from(["", "f"]),
        group=st.sampled_from(["", "g"]),
    )
    def fork(self, which: int, child_count: int, reserve: int, request_id: str, group: str) -> None:
        if (picked := self.pick(which)) is None:
            return
        worker, source = picked

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

        self.begin(
            worker,
            "fork",
            self.pool.fork(
                worker.session,
                source.number,
                child_count,
                reserve_tokens=reserve,
                request_id=request_id,
                group=group,
            ),
            ended,
            (*FULL, RequestIdReused, SequenceBusy),
        )

    @precondition(lambda self: any(one.forks for one in self.harbour.workers))
    @rule(which=ANY, copy_count=st.integers(0, 3))
    def copies_end(self, which: int, copy_count: int) -> None:
        """Zero to two copies: the copier failed after so many; three: all went well."""
        found = [(one, fork) for one in self.harbour.workers if one.running is None for fork in one.forks]
        if not found:
            return
        worker, (made, children) = found[which % len(found)]
        worker.forks.remove((made, children))
        if copy_count < 3:
            self.harbour.copy(made, copy_count)
            self.pool.abort_fork(made)
        else:
            self.harbour.copy(made, len(made.copies))
            views = self.pool.finish_fork(made)
            for view, child in zip(views, children, strict=True):
                if not worker.is_lost:
                    worker.readers[view.number] = self.harbour.reader(view, child)
        self.harbour.check()

    # Hand-off

    @precondition(can_pick)
    @rule(which=ANY, new=NEW_TOKENS, keep=st.integers(0, 3), ttl=st.integers(1, 3))
    def handoff(self, which: int, new: list[int], keep: int, ttl: int) -> None:
        if (picked := self.pick(which)) is None or picked[0].is_copying(picked[1]):
            return
        worker, reader = picked
        self.token_count += 1
        token, expires_at = f"token-{self.token_count}", self.now + ttl
        asked = self.compute(reader, new, {}, keep, names_blocks=False)

        def ended(_: None) -> None:
            del worker.readers[reader.number]
            # Whoever adopts does not know which blocks are shadows; they stay what they are, immutable.
            self.harbour.given[token] = (worker.tenant, expires_at, reader)

        steps = self.pool.handoff(worker.session, reader.number, asked, token=token, expires_at=expires_at)
        self.begin(worker, "handoff", steps, ended)

    @precondition(lambda self: self.harbour.given)
    @rule(which=ANY, token_index=ANY, group=st.sampled_from(["", "g"]))
    def adopt(self, which: int, token_index: int, group: str) -> None:
        worker, given = self.idle(which), self.harbour.given
        if worker is None or not given:
            return
        token = list(given)[token_index % len(given)]
        tenant, _, reader = given[token]
        if tenant != worker.tenant:
            with pytest.raises(HandoffNotFound):
                self.pool.adopt(worker.session, token)
            return
        del given[token]
        view = self.pool.adopt(worker.session, token, group=group)
        reader.asked = None
        worker.readers[view.number] = self.harbour.reader(view, reader)
        self.harbour.check()
        with pytest.raises(HandoffNotFound):
            self.pool.adopt(worker.session, token)

    # Pins, time and eviction

    @precondition(now_and_then)
    @rule(
        which=st.one_of(st.none(), ANY),
        tokens=TOKENS,
        name=NAMES,
        ttl=st.one_of(st.none(), st.integers(0, 3)),
        present_only=st.booleans(),
    )
    def warmup(self, which: int | None, tokens: list[int], name: str, ttl: int | None, present_only: bool) -> None:
        worker = None if which is None else self.idle(which)
        if len(tokens) < BLOCK_TOKENS or (worker is None and self.operator is not None):
            return
        tenant = "red" if worker is None else worker.tenant
        whole = tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS]

        def ended(warmed: Warmed) -> None:
            assert warmed.pinned_tokens + warmed.missing_tokens == len(whole)
            view = warmed.sequence
            if view is None:
                return
            assert worker is not None
            if view.number not in worker.readers:
                fresh = Reader(view.number, (tenant, "", "", b""), list(whole), {}, [], 0)
                worker.readers[view.number] = self.harbour.reader(view, fresh)

        self.begin(
            worker,
            "warmup",
            self.pool.warmup(
                tenant,
                None if worker is None else worker.session,
                Prompt(encode(tokens)),
                name,
                expires_at=None if ttl is None else self.now + ttl,
                present_only=present_only,
            ),
            ended,
            (*FULL, WarmBudgetExceeded),
        )

    @precondition(lambda self: self.operator is None)
    @rule(
        what=st.sampled_from(["unwarm", "evict block", "evict block", "evict unheld", "lookup", "expire"]),
        which=ANY,
        tokens=TOKENS,
        name=NAMES,
        is_stale=st.booleans(),
    )
    def operate(self, what: str, which: int, tokens: list[int], name: str, is_stale: bool) -> None:
        """Calls that belong to no session, so that they may fall between any two slices."""
        pool, tenant = self.pool, TENANTS[which % len(TENANTS)]
        if what == "unwarm":
            self.begin(None, what, pool.unwarm(tenant, name), refusals=(PinNotFound,))
        elif what == "evict block":
            blocks = list(pool._state.blocks.evictable) or [SCRATCH]
            block = blocks[which % len(blocks)]
            generation = pool._state.blocks.generation[block] - is_stale
            steps = pool.evict_block(block, generation, tenant)
            self.begin(None, what, steps, refusals=(BlockNotFound, BlockHeld))
        elif what == "evict unheld" and now_and_then(self):
            self.begin(None, what, pool.evict_unheld())
        elif what == "lookup":
            self.begin(None, what, pool.lookup(tenant, Prompt(encode(tokens))))
        elif what == "expire":
            self.expire()

    def expire(self) -> None:
        self.now += 1
        given = self.harbour.given
        for token in [token for token, (_, expires_at, _) in given.items() if expires_at <= self.now]:
            del given[token]
        # Pins go first, so the pool may let a slice or more pass before hand-offs end.
        self.begin(None, "expire", self.pool.expire(self.now))

    # Sessions

    @precondition(now_and_then)
    @rule(which=ANY)
    def lose_session(self, which: int) -> None:
        if (worker := self.idle(which)) is None:
            return
        worker.is_lost = True
        self.begin(worker, "end session", self.pool.end_session(worker.session))
        self.open_session()

    @precondition(lambda self: any(one.is_lost and one.readers for one in self.harbour.workers))
    @rule(which=ANY)
    def a_lost_process_writes_on(self, which: int) -> None:
        lost = [one for one in self.harbour.workers if one.is_lost]
        if lost:
            self.harbour.scribble(lost[which % len(lost)])
            self.harbour.check()

    @precondition(lambda self: any(one.is_lost for one in self.harbour.workers))
    @rule(which=ANY)
    def prove_quiet(self, which: int) -> None:
        lost = [one for one in self.harbour.workers if one.is_lost and one.running is None]
        if lost:
            self.quiet(lost[which % len(lost)])

    def quiet(self, worker: Worker) -> None:
        """From here on no process of it reads or writes; copies of the service's own go on."""
        copying = [reader for reader in worker.readers.values() if worker.is_copying(reader)]
        expected = len(worker.readers) - len(copying)
        worker.readers.clear()

        def ended(count: int) -> None:
            assert count == expected

        if worker.session in self.pool._state.sessions:
            self.begin(worker, "quiet", self.pool.session_quiet(worker.session), ended)

    # The end: everything comes back

    def teardown(self) -> None:
        if not hasattr(self, "harbour"):
            return
        pool, workers = self.pool, self.harbour.workers
        running: list[Worker | None] = [*workers, None]
        while live := [one for one in running if (one.running if one else self.operator) is not None]:
            for worker in live:
                self.advance(worker)
        while any(worker.forks for worker in workers):
            self.copies_end(0, 3)
        for worker in workers:
            if not worker.is_lost and worker.session % 2:
                while worker.readers:
                    number, _ = worker.readers.popitem()
                    assert finish(pool.release(worker.session, number)) == 1
            if worker.session in pool._state.sessions:
                worker.readers.clear()
                finish(pool.session_quiet(worker.session))
        self.harbour.given.clear()
        finish(pool.expire(1e9))
        for tenant, name in list(pool._state.pins):
            finish(pool.unwarm(tenant, name))
        finish(pool.evict_unheld())
        self.harbour.check()
        stats, state = pool.stats(), pool._state
        assert stats.free_block_count == stats.total_block_count == BLOCKS
        assert (stats.sequence_count, stats.pin_count, stats.warm_budget_used_block_count) == (0, 0, 0)
        assert not any(one.committed_block_count or one.sequence_count for one in stats.tenants)
        assert not (len(state.namespaces) or state.sessions or state.handoffs or state.pins)
        assert not (state.in_flight or state.ending_pins or state.claimed or state.blocks.canonical)


InterleavedMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("KVHARBOR_MODEL_EXAMPLES", "150")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPoolInterleaved = pytest.mark.slow(InterleavedMachine.TestCase)
