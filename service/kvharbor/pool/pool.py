"""The pool: which block holds what, and until when. Synchronous, no I/O, no clock.

One owner calls it. Operations that can be long are `Steps`; drive each to its end, and never interleave two of
one session. Every refusal is a `PoolError` and has changed nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Self

from kvharbor.pool import (
    acquisition,
    allocation,
    block_publication,
    block_release,
    block_resume,
    fork,
    handoff,
    invalidation,
    lifecycle,
    lookup,
    publication,
    recovery,
    release,
    removal,
    resume,
    retirement,
    validate,
    warm,
)
from kvharbor.pool.awaiting import Awaited, Outlook
from kvharbor.pool.block_runs import BlockRun, Chain
from kvharbor.pool.engines import UNNAMED, Engine
from kvharbor.pool.errors import InvalidField, PoolExhausted
from kvharbor.pool.events import BlocksStored, Event
from kvharbor.pool.invariants import check_invariants
from kvharbor.pool.ledger import Ledger, ledger_bytes
from kvharbor.pool.results import (
    Acquired,
    Adopted,
    Commit,
    Committed,
    Extension,
    Fork,
    HandedOff,
    Held,
    Holding,
    Invalidated,
    PinView,
    PoolConfig,
    Presence,
    Prompt,
    Recovered,
    Resumed,
    SequenceView,
    Shadow,
    Usage,
    Warmed,
)
from kvharbor.pool.snapshot import IndexCopy
from kvharbor.pool.state import State
from kvharbor.pool.stats import PinStats, PoolStats, TenantStats
from kvharbor.pool.steps import Steps
from kvharbor.pool.traffic import Traffic

_NO_TRAFFIC = Traffic().stats()


class Pool:
    """An arena's blocks, shared by sessions through one prefix tree."""

    def __init__(
        self, config: PoolConfig, ledger: Ledger | None = None, *, first_number: int = 1, first_revision: int = 0
    ) -> None:
        """Makes an empty pool, with a new ledger; without one it ends with its process."""
        _check_config(config)
        self.config = config
        ledger = ledger or Ledger.create(config, bytearray(ledger_bytes(config)))
        self._state = State(config, ledger, first_number=first_number, first_revision=first_revision)
        self.recovered_from: Recovered | None = None

    @classmethod
    def recovered(
        cls,
        config: PoolConfig,
        ledger: Ledger,
        sessions: Mapping[int, str],
        *,
        first_number: int,
        first_revision: int,
    ) -> Self:
        """Rebuilds a pool from what an earlier process left.

        `sessions` maps the numbers of those that may still resume to their tenants; each is *unresumed*: it has to
        call `resume` and `finish_resume` before anything else. Sequences get numbers from `first_number` on,
        changes have revisions from `first_revision` on: both greater than any that were used before. What was
        found is in `recovered_from`.
        """
        pool = cls(config, ledger, first_number=first_number, first_revision=first_revision)
        pool.recovered_from = recovery.recover(pool._state, sessions)
        return pool

    @property
    def revision(self) -> int:
        """Changes so far; every mutating slice makes one or more."""
        return self._state.revision

    @property
    def available_block_count(self) -> int:
        """Blocks that an Allocate could have now: free and cached ones, less what is claimed."""
        return self._state.available

    @property
    def committed_block_count(self) -> int:
        """Blocks published since the pool was made; a waiter may fit once this grows."""
        return self._state.counters.committed_block_count

    def refuse(self, needed_block_count: int) -> PoolExhausted:
        """Returns the refusal of a request for room that is not even tried, as others have waited for longer. O(1)."""
        return self._state.refuse(needed_block_count, 0)

    # Sessions

    def open_session(self, session: int, tenant: str, engine: Engine = UNNAMED) -> None:
        """Lets a session hold blocks. `session` is positive and never used again."""
        lifecycle.open_session(self._state, session, tenant, engine)

    def name_engine(self, session: int, engine: Engine) -> None:
        """Tells what computes in a session that was recovered, before its first call."""
        lifecycle.name_engine(self._state, session, engine)

    def end_session(self, session: int) -> Steps[None]:
        """The session is lost: what it had not committed goes into quarantine."""
        return lifecycle.end_session(self._state, session)

    def writers_quiet(self, session: int) -> Steps[None]:
        """None of its processes writes a block any more: what was in quarantine is free. Its read holds stay."""
        return lifecycle.writers_quiet(self._state, session)

    def session_quiet(self, session: int) -> Steps[int]:
        """None of its processes touches a block any more: everything it held is given back."""
        return lifecycle.session_quiet(self._state, session)

    def resume(self, session: int, held: Held) -> Steps[Resumed]:
        """Takes up a sequence of an unresumed session, as the session has it; repeated, tells its present state.

        Raises StaleGeneration if a block is not the session's own by the ledger, and what a commit raises: the
        sequence is lost then.
        """
        return resume.resume(self._state, session, held)

    def finish_resume(self, session: int) -> Steps[int]:
        """The session has named all that it has: gives back the rest. Returns how many blocks."""
        return resume.finish_resume(self._state, session)

    def holding(self, session: int) -> Holding:
        """Tells what a session has, an unresumed or ended one too."""
        return lifecycle.holding(self._state, session)

    def reserved_block_count(self, session: int) -> int:
        """Tells how many RESERVED blocks a session has, in its sequences and by itself. O(its sequences)."""
        return lifecycle.reserved_block_count(self._state, session)

    def leased_block_count(self, session: int) -> int:
        """Tells how many of these it has by itself. O(1)."""
        owner = self._state.sessions.get(session)
        return 0 if owner is None else len(owner.blocks.leased)

    # Sequences

    def allocate(
        self,
        session: int,
        prompt: Prompt,
        *,
        reserve_tokens: int = 0,
        max_cached_tokens: int | None = None,
        request_id: str = "",
        group: str = "",
    ) -> Steps[SequenceView]:
        """Matches, holds and reserves in one step.

        Raises RequestTooLarge, TablesFull, PoolExhausted, RequestIdReused.
        """
        return allocation.allocate(
            self._state,
            session,
            prompt,
            reserve_tokens=reserve_tokens,
            max_cached_tokens=max_cached_tokens,
            request_id=request_id,
            group=group,
        )

    def allocate_unless_pending(
        self,
        session: int,
        prompt: Prompt,
        *,
        reserve_tokens: int = 0,
        max_cached_tokens: int | None = None,
        request_id: str = "",
        group: str = "",
    ) -> Steps[SequenceView | Awaited]:
        """Allocates as `allocate` does, or begins to wait for what another session is computing of the prompt [W3].

        A waiter holds nothing. When `drain_moved` has it, or at its `stalls_at`, let it `look_again`; if it does so no
        more, `stop_waiting`.
        """
        return allocation.allocate_unless_pending(
            self._state,
            session,
            prompt,
            reserve_tokens=reserve_tokens,
            max_cached_tokens=max_cached_tokens,
            request_id=request_id,
            group=group,
        )

    def note_computing(self, session: int) -> None:
        """A session is at work, as of the time that was told last, on what it is to commit: others wait for it [W7]."""
        self._state.session(session)
        self._state.writers.signs[session] = self._state.now

    def look_again(self, awaited: Awaited) -> Outlook:
        """Tells whether a waiter goes on waiting, as of the time that was told last."""
        outlook = self._state.writers.look_again(awaited, self._state.now)
        self._state.counters.takeover_count += outlook is Outlook.ABANDONED
        return outlook

    def stop_waiting(self, awaited: Awaited) -> None:
        """Ends a wait; repeating it is nothing."""
        self._state.awaiting.discard(awaited)

    def drain_moved(self) -> list[Awaited]:
        """Returns the waiters that should look again since the last call, in order of arrival at each block."""
        return self._state.awaiting.drain()

    def extend(
        self, session: int, number: int, capacity_tokens: int, known_block_count: int | None = None
    ) -> Steps[Extension]:
        """Grows the table to hold `capacity_tokens`; tells the blocks behind the `known_block_count` first ones."""
        return allocation.extend(self._state, session, number, capacity_tokens, known_block_count)

    def commit(self, session: int, number: int, asked: Commit) -> Steps[Committed]:
        """Publishes the blocks that are full of written tokens."""
        return publication.commit(self._state, session, number, asked)

    def fork(
        self,
        session: int,
        number: int,
        child_count: int,
        *,
        reserve_tokens: int = 0,
        request_id: str = "",
        group: str = "",
    ) -> Steps[Fork]:
        """Makes children; copy the pages it names, then call `finish_fork` or `abort_fork`."""
        return fork.fork(
            self._state,
            session,
            number,
            child_count,
            reserve_tokens=reserve_tokens,
            request_id=request_id,
            group=group,
        )

    def finish_fork(self, made: Fork) -> tuple[SequenceView, ...]:
        """The copies are written: the children are ready."""
        return fork.finish_fork(self._state, made)

    def abort_fork(self, made: Fork) -> None:
        """The copies failed and none is running: the children are gone."""
        fork.abort_fork(self._state, made)

    def handoff(self, session: int, number: int, asked: Commit, *, token: str, expires_at: float) -> Steps[HandedOff]:
        """Commits, then gives the sequence to `token`, a fresh secret of the caller's making.

        Repeated before somebody has adopted it, it tells the first token.
        """
        return handoff.handoff(self._state, session, number, asked, token=token, expires_at=expires_at)

    def adopt(self, session: int, token: str, *, request_id: str = "", group: str = "") -> Adopted:
        """Takes a handed-off sequence; raises HandoffNotFound, TablesFull, RequestIdReused."""
        return handoff.adopt(self._state, session, token, request_id=request_id, group=group)

    def tell_end(self, session: int, number: int, tell: Callable[[int], None]) -> None:
        """Has `tell` called, once, with the count of a sequence's tokens when it ends, whoever has it by then.

        The first one stays, and it calls nothing of the pool. Nothing is told of a sequence that is gone already.
        """
        sequence = self._state.session(session).sequences.get(number)
        if sequence is not None and sequence.tell_end is None:
            sequence.tell_end = tell

    def release(self, session: int, number: int) -> Steps[int]:
        """Ends a sequence; returns 0 if it had ended already."""
        return release.release(self._state, session, number)

    def release_request(self, session: int, request_id: str) -> Steps[int]:
        """Ends the session's sequence with this request_id; returns 0 if there is none."""
        return release.release_request(self._state, session, request_id)

    def release_group(self, session: int, group: str) -> Steps[int]:
        """Ends the session's sequences of a group; returns how many."""
        return release.release_group(self._state, session, group)

    # Blocks that a session holds by itself

    def acquire(
        self,
        session: int,
        chain: Chain,
        table_block_count: int = 0,
        *,
        computes: bool = False,
        uses: bool = False,
        unless_pending: bool = False,
    ) -> Steps[Acquired]:
        """Holds the longest run of a chain that is there and leases the rest of a table, all or nothing.

        With `computes` others are told that the missing blocks are pending. With neither, nor a table, it counts as a
        request only if it `uses` what is there. With `unless_pending` nothing is done, and only `pending` told, where
        another session is computing what comes next [W8]. Raises RequestTooLarge, PoolExhausted.
        """
        return acquisition.acquire(
            self._state,
            session,
            chain,
            table_block_count,
            computes=computes,
            uses=uses,
            unless_pending=unless_pending,
        )

    def lease(self, session: int, least: int, want: int) -> Steps[BlockRun]:
        """Reserves up to `want` fresh blocks, at least `least` or none; raises RequestTooLarge, PoolExhausted."""
        return acquisition.lease(self._state, session, least, want)

    def abandon(self, session: int, chain: Chain) -> Steps[None]:
        """Ends the marks that a session has of these contents: it does not compute them any more [B8]."""
        return acquisition.abandon(self._state, session, chain)

    def commit_blocks(
        self, session: int, parent: BlockRun, blocks: BlockRun, chain: Chain
    ) -> Steps[tuple[Shadow, ...]]:
        """Publishes leased blocks behind `parent`, one block that the session holds, or none: behind the root.

        Repeating it changes nothing. Raises BlockNotHeld.
        """
        return block_publication.commit_blocks(self._state, session, parent, blocks, chain)

    def release_blocks(self, session: int, blocks: BlockRun) -> Steps[int]:
        """Ends holds; returns how many of them the session had. Those named first are evicted first."""
        return block_release.release_blocks(self._state, session, blocks)

    def invalidate(self, session: int, block_id: int, generation: int) -> Steps[Invalidated]:
        """Takes a committed block, and all behind it, out of the index; raises BlockNotHeld, BlockHeld."""
        return invalidation.invalidate(self._state, session, block_id, generation)

    def resume_blocks(self, session: int, blocks: BlockRun) -> Steps[BlockRun]:
        """Takes up what an unresumed session held by itself; returns those that are not its own any more."""
        return block_resume.resume_blocks(self._state, session, blocks)

    # Prefixes

    def warmup(
        self,
        tenant: str,
        session: int | None,
        prompt: Prompt,
        name: str,
        *,
        expires_at: float | None = None,
        present_only: bool = False,
        room_for_all: bool = False,
        request_id: str = "",
    ) -> Steps[Warmed]:
        """Pins a prefix for (tenant, name); raises WarmBudgetExceeded, TablesFull, PoolExhausted, RequestIdReused.

        `room_for_all` holds what is missing against the budget although it is not promised yet, as it will be
        computed for this pin later. `request_id` names the sequence that fills it.
        """
        return warm.warmup(
            self._state,
            tenant,
            session,
            prompt,
            name,
            expires_at=expires_at,
            present_only=present_only,
            room_for_all=room_for_all,
            request_id=request_id,
        )

    def pin(self, tenant: str, name: str) -> PinView | None:
        """Tells how far a pin is; None if there is none."""
        return warm.pin_view(self._state, tenant, name)

    def pins(self, tenant: str | None, most: int) -> tuple[PinStats, ...]:
        """Returns a tenant's pins, or with None all: the oldest first, at most so many."""
        return warm.pin_stats(self._state, tenant, most)

    def unwarm(self, tenant: str, name: str) -> Steps[None]:
        """Ends a pin; raises PinNotFound."""
        return warm.unwarm(self._state, tenant, name)

    def versions(self, tenant: str) -> list[str]:
        """Returns the versions that a tenant's namespaces are of."""
        return self._state.namespaces.versions_of(tenant)

    def retire_version(self, tenant: str, version: str) -> Steps[None]:
        """Frees what a tenant's namespaces of this version have cached, and what is held once it is released.

        Its pins end. Whoever allocates, warms or acquires in one of them later makes that an ordinary one again.
        """
        return retirement.retire_version(self._state, tenant, version)

    def lookup(self, tenant: str, prompt: Prompt, max_cached_tokens: int | None = None) -> Steps[Presence]:
        """Tells what is there; changes nothing."""
        return lookup.lookup(self._state, tenant, prompt, max_cached_tokens)

    def evict_block(self, block_id: int, generation: int, tenant: str | None = None) -> Steps[int]:
        """Removes a block and all below it; raises BlockNotFound (also for another tenant's), BlockHeld."""
        return removal.evict_block(self._state, block_id, generation, tenant)

    def evict_unheld(self) -> Steps[int]:
        """Removes every cached block."""
        return removal.evict_unheld(self._state)

    # Time

    def tell_time(self, now: float) -> None:
        """Sets the time, by the caller's monotonic clock: for what the pool tells, and for who waits for a writer."""
        state = self._state
        if state.history is not None and not state.now:
            state.history.evicted.begin(now)
        state.now = now
        state.marks.expire(now)

    def next_deadline(self) -> float | None:
        """Returns when `expire` has something to do next, by the caller's monotonic clock."""
        state = self._state
        ends = [pin.expires_at for pin in state.pins.values() if pin.expires_at is not None]
        ends += [given.expires_at for given in state.handoffs.values()]
        return min(ends, default=None)

    def expire(self, now: float) -> Steps[None]:
        """Ends the pins and hand-offs whose time is over."""
        yield from warm.expire(self._state, now)
        yield from handoff.expire(self._state, now)

    # What there is to see

    def drain_events(self) -> list[Event]:
        """Returns what changed since the last call, in order."""
        events, self._state.events = self._state.events, []
        return events

    def index_chains(self, tenant: str | None = None, most_blocks: int | None = None) -> Iterator[BlocksStored]:
        """Describes the whole index as of now, parents before children, in chains of at most `most_blocks`.

        The call copies some bytes a block of the pool; what is read off the copy later does not touch the pool.
        """
        return IndexCopy(self._state, tenant).chains(most_blocks)

    def usage(self) -> Usage:
        """Tells who uses the pool."""
        state = self._state
        return Usage(len(state.sessions), self._sequence_count(), len(state.pins))

    def stats(self) -> PoolStats:
        """Takes one consistent snapshot, in O(tenants + engines + sessions), and some nanoseconds a block."""
        state, blocks = self._state, self._state.blocks
        return PoolStats(
            revision=state.revision,
            total_block_count=blocks.total_count,
            scratch_block_count=blocks.first_block,
            free_block_count=blocks.free.count,
            reserved_block_count=blocks.reserved_count,
            active_block_count=blocks.active_count,
            cached_block_count=blocks.cached_count,
            warm_block_count=blocks.warm_count,
            quarantined_block_count=blocks.quarantined_count,
            shared_block_count=blocks.shared_count,
            sequence_count=self._sequence_count(),
            pin_count=len(state.pins),
            warm_budget_used_block_count=blocks.pinned_count + state.promised,
            warm_budget_block_count=state.warm_budget,
            unrecorded_count=state.ledger.unrecorded_count,
            counters=replace(state.counters),
            tenants=tuple(
                TenantStats(
                    tenant,
                    one.committed_block_count,
                    one.sequence_count,
                    one.prompt_token_count,
                    one.reused_token_count,
                )
                for tenant, one in sorted(state.tenants.items())
            ),
            traffic=_NO_TRAFFIC if state.history is None else state.history.traffic.stats(),
            engines=state.engines.stats(
                state.block_tokens, lifecycle.held_by_engine(state), state.engines.committed(blocks.state)
            ),
        )

    def _sequence_count(self) -> int:
        return sum(tenant.sequence_count for tenant in self._state.tenants.values())

    def check_invariants(self) -> None:
        """Walks everything and raises InvariantViolation if a rule does not hold. O(size of the pool)."""
        check_invariants(self._state)


def _check_config(config: PoolConfig) -> None:
    for field, value, least, most in (
        ("block_count", config.block_count, 1, (1 << 31) - 1 - config.scratch_blocks),
        ("block_tokens", config.block_tokens, 1, 1 << 16),
        ("scratch_blocks", config.scratch_blocks, 0, 1 << 16),
        ("min_reuse_tokens", config.min_reuse_tokens, 0, validate.MAX_TOKENS),
        ("slice_blocks", config.slice_blocks, 1, 1 << 16),
        ("warm_budget_ratio", config.warm_budget_ratio, 0, 1),
    ):
        if not least <= value <= most:
            raise InvalidField(field=field, value=value, limit=f"{least} to {most}", remedy="correct the setting")
