"""An owner of blocks in memory, for engines' bookkeeping without a service: block calls as sessions see them.

It knows contents by their tokens, evicts what nobody holds, tail first, and checks what a session says of its blocks.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from fake_computing import FakeComputing
from kvharbor.client import (
    Acquired,
    BlockRun,
    Chain,
    CommitChain,
    Leased,
    PoolExhausted,
    RequestTooLarge,
)

Content = tuple[Any, ...]
KEY_BYTES = 32


def locked(method: Any) -> Any:
    """One call at a time, whoever calls."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with self.owner.lock:
            return method(self, *arguments, **keywords)

    return call


def listed(chain: Chain | CommitChain) -> list[Any]:
    """The tokens of a chain, which an engine gives as a list, or its keys: then a block has one."""
    keys = [chain.keys[first : first + KEY_BYTES] for first in range(0, len(chain.keys), KEY_BYTES)]
    return keys or list(cast("Sequence[int]", chain.tokens))


@dataclass(eq=False)
class FakeBlock:
    """A block that is not free."""

    block_id: int
    generation: int
    content: Content | None = None
    parent: "FakeBlock | None" = None
    holders: "set[FakeCalls | FakeBlock]" = field(default_factory=set)
    """Sessions, and shadows of this content."""


class FakeOwner:
    """`usable_count` blocks of `block_tokens` (or keys, with 1), behind `scratch_count` that nobody gets."""

    def __init__(self, usable_count: int, block_tokens: int, scratch_count: int = 2) -> None:
        self.block_tokens = block_tokens
        self.usable_count = usable_count
        self.free = list(range(scratch_count, scratch_count + usable_count))
        self.blocks: dict[int, FakeBlock] = {}
        self.index: dict[Content, FakeBlock] = {}
        self.generation = 0
        self.evicted_count = 0
        self.reused_counts: list[int] = []
        """Of each request that counts as one."""
        self.waiting: list[FakeGrant] = []
        self.lock = threading.RLock()

    def session(self) -> "FakeCalls":
        """Another engine."""
        return FakeCalls(self)

    @property
    def available_count(self) -> int:
        """Free blocks, and cached ones that nobody holds."""
        return len(self.free) + len(self.unheld())

    def unheld(self) -> list[FakeBlock]:
        """Blocks that nobody holds: whoever holds one holds all before it."""
        held: set[FakeBlock] = set()
        for block in self.blocks.values():
            each: FakeBlock | None = block if block.holders else None
            while each is not None and each not in held:
                held.add(each)
                each = each.parent
        return [block for block in self.blocks.values() if block not in held]

    def run(self, blocks: Sequence[FakeBlock]) -> BlockRun:
        """Names them."""
        return BlockRun.of((block.block_id, block.generation) for block in blocks)

    def match(self, content: Content) -> list[FakeBlock]:
        """The longest published run of a prompt."""
        found = []
        for end in range(self.block_tokens, len(content) + 1, self.block_tokens):
            block = self.index.get(content[:end])
            if block is None:
                break
            found.append(block)
        return found

    def fresh(self, count: int, holder: "FakeCalls") -> list[FakeBlock]:
        """Leases so many."""
        while len(self.free) < count:
            parents = {block.parent for block in self.blocks.values()}
            self.remove(next(block for block in self.unheld() if block not in parents))
            self.evicted_count += 1
        taken = []
        for _ in range(count):
            self.generation += 1
            block = FakeBlock(self.free.pop(), self.generation, holders={holder})
            self.blocks[block.block_id] = block
            taken.append(block)
        return taken

    def remove(self, block: FakeBlock) -> None:
        """Frees it."""
        del self.blocks[block.block_id]
        if block.content is not None and self.index.get(block.content) is block:
            del self.index[block.content]
        self.free.append(block.block_id)

    def admit(self, calls: "FakeCalls", chain: Chain) -> Acquired:
        """Holds what is there and leases the rest, or refuses."""
        if chain.table_block_count > self.usable_count:
            return Acquired(refusal=RequestTooLarge("never"))
        found = self.match(tuple(listed(chain)))
        needed = chain.table_block_count - len(found)
        unheld = self.unheld()
        if needed > len(self.free) + len(unheld) - sum(block in unheld for block in found):
            return Acquired(refusal=PoolExhausted("full"))
        for block in found:
            block.holders.add(calls)
        if chain.computes and len(found) * self.block_tokens < len(listed(chain)):
            calls.marks.add(tuple(listed(chain)))
        if chain.table_block_count or chain.computes or chain.uses:
            self.reused_counts.append(len(found))
        return Acquired(self.run(found), self.run(self.fresh(needed, calls)))

    def serve(self) -> None:
        """Grants what waits and fits now, in order."""
        while self.waiting:
            result = self.admit(self.waiting[0].calls, self.waiting[0].chain)
            if isinstance(result.refusal, PoolExhausted):
                break
            self.waiting.pop(0).result = result


@dataclass(eq=False)
class FakeGrant:
    """A place in the queue."""

    owner: FakeOwner
    calls: "FakeCalls"
    chain: Chain
    result: Acquired | None = None

    @locked
    def poll(self) -> Acquired | None:
        """What it was granted."""
        return self.result

    @locked
    def cancel(self) -> None:
        """Leaves the queue."""
        if self in self.owner.waiting:
            self.owner.waiting.remove(self)


class FakeCalls:
    """The block calls of one session."""

    def __init__(self, owner: FakeOwner) -> None:
        self.owner = owner
        self.on_recall: Callable[[int], BlockRun] | None = None
        self.calls: list[str] = []
        self.computing = FakeComputing()
        self.stray_count = 0
        self.marks: set[Content] = set()
        """What it has said to compute, until it has."""

    @property
    def status(self) -> "FakeCalls":
        """The status page."""
        return self

    @property
    def available_block_count(self) -> int:
        """Of the status page."""
        return self.owner.available_count

    @locked
    def held(self) -> list[FakeBlock]:
        """What this session holds."""
        return [block for block in self.owner.blocks.values() if self in block.holders]

    @locked
    def acquire(self, chains: Sequence[Chain], *, wait_s: float = 0.0) -> list[Acquired]:
        """As BlockCalls.acquire."""
        self.calls.append("acquire")
        results: list[Acquired] = []
        for chain in chains:
            if results and results[-1].refusal is not None:
                results.append(Acquired(refusal=PoolExhausted("behind one that does not fit")))
                continue
            behind = Acquired(refusal=PoolExhausted("others wait"))
            result = behind if self.owner.waiting and chain.table_block_count else self.owner.admit(self, chain)
            if wait_s and isinstance(result.refusal, PoolExhausted):
                grant = FakeGrant(self.owner, self, chain)
                self.owner.waiting.append(grant)
                self._recall_others(chain.table_block_count)
                result = replace(result, waiting=True, grant=cast("Any", grant))
            results.append(result)
        return results

    @locked
    def lease(self, least: int, want: int, *, growth: bool = False) -> Leased:
        """As BlockCalls.lease."""
        self.calls.append("lease")
        if least > self.owner.available_count:
            self._recall_others(least)
        if least > self.owner.available_count:
            raise PoolExhausted("full")
        count = min(want, self.owner.available_count)
        return Leased(self.owner.run(self.owner.fresh(count, self)))

    @locked
    def commit(self, chains: Sequence[CommitChain]) -> None:
        """As BlockCalls.commit: content that is published stays a private copy."""
        self.calls.append("commit")
        for chain in chains:
            parent = self._own(chain.parent)[0] if len(chain.parent) else None
            content = parent.content or () if parent else ()
            for number, block in enumerate(self._own(chain.blocks)):
                assert block.content is None, f"block {block.block_id} is written and committed twice"
                first = number * self.owner.block_tokens
                content = (*content, *listed(chain)[first : first + self.owner.block_tokens])
                assert len(content) % self.owner.block_tokens == 0
                block.content = content
                self.marks.discard(content)
                canonical = self.owner.index.setdefault(content, block)
                if canonical is not block:
                    canonical.holders.add(block)
                block.parent = parent
                parent = canonical

    @locked
    def abandon(self, chains: Sequence[Chain]) -> None:
        """As BlockCalls.abandon: nobody is told here of what others compute."""
        self.calls.append("abandon")
        self.marks.difference_update(tuple(listed(chain)) for chain in chains)

    @locked
    def release(self, blocks: BlockRun) -> None:
        """As BlockCalls.release."""
        self.calls.append("release")
        for block in [self.owner.blocks.get(block_id) for block_id in blocks.block_ids.tolist()]:
            if block is None or self not in block.holders:
                self.stray_count += 1
                continue
            block.holders.discard(self)
            canonical = None if block.content is None else self.owner.index[block.content]
            if canonical is not block:
                self.owner.remove(block)
            if canonical is not None:
                canonical.holders.discard(block)
        self.owner.serve()

    @locked
    def die(self) -> None:
        """Ends the session: what it has published stays."""
        self.release(self.owner.run(self.held()))

    def _own(self, run: BlockRun) -> list[FakeBlock]:
        blocks = [self.owner.blocks[block_id] for block_id in run.block_ids.tolist()]
        assert [block.generation for block in blocks] == run.generations.tolist()
        assert all(self in block.holders for block in blocks)
        return blocks

    def _recall_others(self, count: int) -> None:
        for calls in {holder for block in self.owner.blocks.values() for holder in block.holders} - {self}:
            if isinstance(calls, FakeCalls) and calls.on_recall is not None:
                recalled = calls.on_recall(count)
                if len(recalled):
                    calls.release(recalled)
