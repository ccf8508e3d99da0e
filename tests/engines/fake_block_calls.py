"""What `Pool.blocks` is to an engine, on a FakeOwner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.fake_owner import Block, FakeMark, FakeOwner, FakeWait
from engines.fake_store import FakeStore
from fake_computing import FakeComputing
from kvharbor.client import (
    Acquired,
    BlockNotHeld,
    BlockRun,
    Chain,
    CommitChain,
    Grant,
    HarborError,
    Leased,
    Pending,
    PoolExhausted,
    RequestTooLarge,
)

KEY_BYTES = 32
KINDS = ("acquire", "lease", "commit", "abandon", "release")
IDLE = 500
"""Ticks without a commit after which nobody is told any more of what a session computes, unless a step is under way."""


@dataclass
class FakeStatus:
    """The status page of one pool."""

    owner: FakeOwner

    @property
    def available_block_count(self) -> int:
        return self.owner.available(set())

    @property
    def recall_count(self) -> int:
        return self.owner.recall_count

    @property
    def waiting_count(self) -> int:
        return len(self.owner.queue)


@dataclass(eq=False)
class FakeBlockCalls:
    """What `Pool.blocks` is to one engine."""

    owner: FakeOwner
    direct: set[Block] = field(default_factory=set)
    version: str = ""
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    on_refusal: Callable[[HarborError], object] | None = None
    tells_pending: bool = False
    committed: int = 0
    given_up: set[tuple[Any, ...]] = field(default_factory=set)
    stores: list[FakeStore] = field(default_factory=list)
    computing: FakeComputing = field(default_factory=FakeComputing)

    @property
    def status(self) -> FakeStatus:
        return FakeStatus(self.owner)

    def acquire(
        self, chains: Sequence[Chain], *, wait_s: float = 0.0, timeout_s: float | None = None
    ) -> list[Acquired]:
        self.calls["acquire"] += 1
        results: list[Acquired] = []
        for chain in chains:
            if results and results[-1].refusal is not None:
                results.append(Acquired(refusal=PoolExhausted("behind one that does not fit")))
                continue
            result = self.try_chain(chain)
            if isinstance(result.refusal, PoolExhausted):
                if wait_s:
                    result = Acquired(waiting=True, refusal=result.refusal, grant=self._queued(chain))
                self._recall()
            results.append(result)
        self.owner.check()
        return results

    def lease(self, least: int, want: int, *, growth: bool = False, timeout_s: float | None = None) -> Leased:
        self.calls["lease"] += 1
        count = min(want, self.owner.available(set()))
        if count < least or (self.owner.queue and not growth):
            self._recall()
            raise PoolExhausted(f"{least} blocks wanted, {count} there")
        taken = self.owner.take(self, count, set())
        self.owner.check()
        return Leased(_run(taken))

    def lease_ahead(self, want: int) -> list[tuple[int, int]]:
        """Leases for a store what is there: while others wait no more than one."""
        count = min(want, self.owner.available(set()), 1 if self.owner.queue else want)
        return [*_run(self.owner.take(self, count, set()))]

    def store(self) -> FakeStore:
        """Returns a store of the session, which others get back."""
        self.stores.append(FakeStore(self))
        return self.stores[-1]

    def commit(self, chains: Sequence[CommitChain]) -> None:
        self.calls["commit"] += 1
        for chain in chains:
            parent = self._named(chain.parent)[0] if len(chain.parent) else None
            blocks = self._named(chain.blocks)
            if any(block.state != "reserved" for block in blocks) or (parent and parent.state == "reserved"):
                raise BlockNotHeld("not in the state that a commit needs")
            for index, block in enumerate(blocks):
                key = chain.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
                parent = self._publish(block, self._place(chain, parent, key))
        self.owner.serve_queue()
        self.owner.check()

    def abandon(self, chains: Sequence[Chain]) -> None:
        self.calls["abandon"] += 1
        for chain in chains:
            last = (self, self._namespace(chain), chain.keys[-KEY_BYTES:])
            for mark in [*self.owner.marks]:
                if (mark.session, mark.namespace, mark.keys[-1]) == last:
                    self.owner.marks.remove(mark)
                    self.given_up.update((mark.namespace, key) for key in mark.keys)

    def release(self, blocks: BlockRun) -> None:
        self.calls["release"] += 1
        for number, generation in blocks:
            block = self.owner.blocks[number]
            if block.generation == generation:
                self.owner.release(self, block)
        self.owner.serve_queue()
        self.owner.check()

    def bump_namespace(self, version: str = "") -> str:
        self.version = version or f"version-{next(self.owner.clock)}"
        used = {session.version for session in self.owner.sessions}
        for block in self.owner.evictable(set()):
            if block.place is not None and block.place[0][1] not in used:
                self.owner.make_free(block)
        return self.version

    def close(self) -> None:
        """The session ends, as by the death of its process."""
        self.owner.queue = [wait for wait in self.owner.queue if wait.session is not self]
        for block in [*self.direct]:
            self.owner.release(self, block)
        self.owner.sessions.remove(self)
        self.owner.marks = [mark for mark in self.owner.marks if mark.session is not self]
        self.owner.serve_queue()

    def try_chain(self, chain: Chain) -> Acquired:
        """Holds what is there of a chain and leases the rest, or holds nothing."""
        owner = self.owner
        held: list[Block] = []
        keys = [chain.keys[at : at + KEY_BYTES] for at in range(0, len(chain.keys), KEY_BYTES)]
        parent: Block | None = None
        for key in keys:
            found = owner.index.get(self._place(chain, parent, key))
            if found is None:
                break
            held.append(found)
            parent = found
        missing = keys[len(held) :]
        pending = self._pending(chain, missing)
        if chain.unless_pending and pending is not None:
            return Acquired(pending=pending, stands_back=True)
        lacking = max(0, chain.table_block_count - len(held))
        if chain.table_block_count > len(owner.blocks) - 1:
            return Acquired(refusal=RequestTooLarge("larger than the pool"))
        if lacking > owner.available(set(held)):
            owner.counters["refused"] += 1
            return Acquired(refusal=PoolExhausted(f"{lacking} blocks are not there"))
        owner.counters["hits"] += len(held)
        self.direct.update(held)
        for block in held:
            self._move_marks(block)
        leased = owner.take(self, lacking, set(held))
        if pending is None and chain.computes:
            self.committed = next(owner.clock)
            self._mark(FakeMark(self, self._namespace(chain), missing, held[-1] if held else None))
        return Acquired(held=_run(held), leased=_run(leased), pending=pending)

    def _pending(self, chain: Chain, keys: list[bytes]) -> Pending | None:
        """What another session computes behind what is there, and gets on with."""
        if not keys or not self.tells_pending:
            return None
        writers = [
            mark.session
            for mark in self.owner.marks
            if (mark.namespace, mark.keys[0]) == (self._namespace(chain), keys[0])
        ]
        now = next(self.owner.clock)
        if self not in writers and any(each.computing.is_under_way or now - each.committed < IDLE for each in writers):
            return Pending(len(keys), "another", 0.0)
        return None

    def _mark(self, mark: FakeMark) -> None:
        known = [each for each in self.owner.marks if (each.session, each.namespace) == (self, mark.namespace)]
        if mark.keys and not any((each.keys, each.parent) == (mark.keys, mark.parent) for each in known):
            self.owner.marks.append(mark)
            self.given_up.difference_update((mark.namespace, key) for key in mark.keys)

    def _namespace(self, chain: Chain | CommitChain) -> tuple[Any, ...]:
        return (chain.namespace.scheme, chain.namespace.version or self.version, chain.namespace.salt)

    def _place(self, chain: Chain | CommitChain, parent: Block | None, key: bytes) -> tuple[Any, ...]:
        assert len(key) == KEY_BYTES
        return (self._namespace(chain), parent, key)

    def _publish(self, block: Block, place: tuple[Any, ...]) -> Block:
        self.committed = next(self.owner.clock)
        canonical = self.owner.index.setdefault(place, block)
        if canonical is block:
            block.state, block.place = "committed", place
        else:
            self.owner.counters["shadows"] += 1
            block.state, block.canonical = "shadow", canonical
        if (place[0], place[2]) in self.given_up:
            own = [mark for mark in self.owner.marks if (mark.session, mark.namespace) == (self, place[0])]
            assert any(place[2] in mark.keys for mark in own), "[E18] it was told too early that this is given up"
        self._move_marks(canonical)
        return canonical

    def _move_marks(self, block: Block) -> None:
        """Moves the session's marks over a block that it holds now."""
        assert block.place is not None
        for mark in self.owner.marks:
            if mark.session is self and (mark.namespace, mark.parent, mark.keys[0]) == block.place:
                mark.keys, mark.parent = mark.keys[1:], block
                self.given_up.discard((mark.namespace, block.place[2]))
        self.owner.marks = [mark for mark in self.owner.marks if mark.keys]

    def _named(self, run: BlockRun) -> list[Block]:
        found = []
        for number, generation in run:
            block = self.owner.blocks[number]
            if block.generation != generation or block not in self.owner.effective(self):
                raise BlockNotHeld(f"block {number} of generation {generation} is not held")
            found.append(block.canonical or block)
        return found

    def _queued(self, chain: Chain) -> Grant:
        def cancel() -> None:
            self.owner.queue = [each for each in self.owner.queue if each is not wait]
            self.owner.serve_queue()

        wait = FakeWait(self, chain, Grant(cancel))
        self.owner.queue.append(wait)
        return wait.grant

    def _recall(self) -> None:
        self.owner.recall_count += 1
        for session in self.owner.sessions:
            for store in session.stores:
                store.rest()


def _run(blocks: list[Block]) -> BlockRun:
    return BlockRun.of((block.number, block.generation) for block in blocks)
