"""A small service for block calls, in memory: several sessions on one pool, each with what an engine calls.

It is as plain as can be, looks at everything whenever it is asked something, and checks itself: it is the reference for
what engines are promised.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvharbor.client import Chain, Grant

if TYPE_CHECKING:
    from engines.fake_block_calls import FakeBlockCalls


@dataclass(eq=False)
class Block:
    """One block. `place` is (namespace, parent block, key) of what it holds; a shadow has a canonical block too."""

    number: int
    generation: int = 0
    state: str = "free"
    session: "FakeBlockCalls | None" = None
    place: tuple[Any, ...] | None = None
    canonical: "Block | None" = None
    used: int = 0

    @property
    def parent(self) -> "Block | None":
        return None if self.place is None else self.place[1]


class FakeOwner:
    """A pool of `block_count` blocks, the first of which is never given out."""

    def __init__(self, block_count: int) -> None:
        self.blocks = [Block(number) for number in range(block_count)]
        self.sessions: list[FakeBlockCalls] = []
        self.index: dict[tuple[Any, ...], Block] = {}
        self.marks: list[FakeMark] = []
        self.clock = itertools.count(1)
        self.queue: list[FakeWait] = []
        self.counters = dict.fromkeys(("evicted", "shadows", "granted_later", "refused", "hits"), 0)
        self.recall_count = 0
        self.watchers: list[Callable[[FakeBlockCalls, int], None]] = []

    def session(self) -> "FakeBlockCalls":
        """Opens a session."""
        from engines.fake_block_calls import FakeBlockCalls

        self.sessions.append(FakeBlockCalls(self))
        return self.sessions[-1]

    # What is what

    def effective(self, session: "FakeBlockCalls") -> set[Block]:
        """What a session holds: what it has asked for, and all before it."""
        held = set(session.direct)
        for block in session.direct:
            each: Block | None = block.canonical or block
            while each is not None:
                held.add(each)
                each = each.parent
        return held

    def active(self) -> set[Block]:
        return {block for session in self.sessions for block in self.effective(session)}

    def evictable(self, spared: set[Block]) -> list[Block]:
        """Cached blocks in the order of eviction: children before parents, those used longest ago first."""
        kept = self.active() | spared
        for block in [*kept]:
            each = block.parent
            while each is not None:
                kept.add(each)
                each = each.parent
        cached = [block for block in self.blocks if block.state == "committed" and block not in kept]
        return sorted(cached, key=lambda block: (block.used, -self.depth(block)))

    @staticmethod
    def depth(block: Block) -> int:
        depth = 0
        while (block.parent) is not None:
            block, depth = block.parent, depth + 1
        return depth

    def free(self) -> list[Block]:
        return [block for block in self.blocks[1:] if block.state == "free"]

    def available(self, spared: set[Block]) -> int:
        return len(self.free()) + len(self.evictable(spared))

    # Changes

    def make_free(self, block: Block) -> None:
        if block.state == "committed":
            del self.index[block.place or ()]
        block.state, block.session, block.place, block.canonical = "free", None, None, None
        block.generation += 1

    def take(self, session: "FakeBlockCalls", count: int, spared: set[Block]) -> list[Block]:
        """Leases so many blocks; the caller knows that they are there."""
        while len(self.free()) < count:
            victim = next(
                each for each in self.evictable(spared) if not any(block.parent is each for block in self.blocks)
            )
            self.counters["evicted"] += 1
            self.make_free(victim)
        taken = self.free()[:count]
        for block in taken:
            block.state, block.session = "reserved", session
            session.direct.add(block)
        return taken

    def release(self, session: "FakeBlockCalls", block: Block) -> None:
        if block not in session.direct:
            return
        for watcher in self.watchers:
            watcher(session, block.number)
        session.direct.discard(block)
        block.used = next(self.clock)
        held = self.effective(session)
        self.marks = [mark for mark in self.marks if mark.session is not session or mark.parent in {None, *held}]
        if block.state in ("reserved", "shadow"):
            self.make_free(block)

    def serve_queue(self) -> None:
        """First come, first served."""
        while self.queue:
            wait = self.queue[0]
            result = wait.session.try_chain(wait.chain)
            if result.refusal is not None:
                return
            self.queue.pop(0)
            self.counters["granted_later"] += 1
            wait.grant.end(result)

    def check(self) -> None:
        """Raises AssertionError where something does not add up."""
        assert self.blocks[0].state == "free"
        for block in self.blocks:
            holders = [session for session in self.sessions if block in session.direct]
            if block.state == "free":
                assert not holders
            if block.state in ("reserved", "shadow"):
                assert holders == [block.session]
            if block.state == "committed":
                assert self.index[block.place or ()] is block
                assert block.parent is None or block.parent.state == "committed"


@dataclass(eq=False)
class FakeMark:
    """What a session computes: keys to come behind a block that it holds."""

    session: "FakeBlockCalls"
    namespace: tuple[Any, ...]
    keys: list[bytes]
    parent: Block | None


@dataclass(eq=False)
class FakeWait:
    """A chain that waits for room."""

    session: "FakeBlockCalls"
    chain: Chain
    grant: Grant
