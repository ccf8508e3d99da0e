"""Every block's state, generation and holders, how many blocks are in each class, and the ledger's words for them.

One class a block at every instant ([G5]): free, reserved, active, warm, cached, quarantined; the counters here
are those classes' sizes, kept up at each transition so that no statistic ever walks the pool. Each transition stores
the ledger's words in the order that `ledger.py` argues for.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import IntEnum

from kvharbor.pool.eviction import EvictionPolicy
from kvharbor.pool.ledger import HELD, SESSION_SHIFT, Ledger
from kvharbor.pool.runs import FreeRuns


class BlockState(IntEnum):
    """Where a block is in its life (docs/invariants.md); each state names the collection that knows its blocks."""

    FREE = 0  # in FreeRuns
    RESERVED = 1  # in one sequence's table, behind its committed blocks
    COMMITTED = 2  # in the prefix tree; in the eviction policy too when refs = pins = 0
    SHADOW = 3  # in one sequence's table, and in `canonical`
    QUARANTINED = 4  # in a table of a lost session
    SCRATCH = 5  # ids below first_block; never handed out [P6]


FREE, RESERVED, COMMITTED, SHADOW, QUARANTINED, SCRATCH = BlockState


class Blocks:
    """The columns. Callers keep the rules of who may call what; transitions are checked in debug by invariants."""

    def __init__(self, first_block: int, block_count: int, policy: EvictionPolicy, ledger: Ledger) -> None:
        id_count = first_block + block_count
        self.first_block = first_block
        self.total_count = block_count
        self.free = FreeRuns(first_block, block_count)
        self.evictable = policy
        self.ledger = ledger
        self.state = bytearray([SCRATCH]) * first_block + bytearray([FREE]) * block_count
        self.generation = [1] * id_count
        # Sequences and sessions holding a COMMITTED block (shadows of it too), and warm pins holding it.
        self.refs = [0] * id_count
        self.pins = [0] * id_count
        # The canonical block of each SHADOW, also while it is quarantined.
        self.canonical: dict[int, int] = {}
        self.reserved_count = 0
        self.active_count = 0
        self.warm_count = 0
        self.quarantined_count = 0
        self.shared_count = 0
        self.pinned_count = 0

    @property
    def cached_count(self) -> int:
        """Blocks that can be evicted."""
        return len(self.evictable)

    def reserve(self, block_count: int, after: int | None, session: int) -> list[int]:
        """FREE -> RESERVED for a session. The caller has made sure that so many are free."""
        taken = self.free.take(block_count, after)
        self._give_out(taken, session)
        return taken

    def reserve_evicted(self, victims: Sequence[int], after: int | None, session: int) -> list[int]:
        """Blocks that were evicted as too few were free -> RESERVED, one generation later, with all free ones.

        They are not FREE in between, neither here nor in their words [L4].
        """
        generation = self.generation
        for block in victims:
            generation[block] += 1
        taken = self.free.take(self.free.count)
        taken += victims
        taken.sort()
        if after is not None:
            # All of them go to one table: only what extends its last run has a better place than its order.
            following = bisect_right(taken, after)
            taken = taken[following:] + taken[:following]
        self._give_out(taken, session)
        return taken

    def _give_out(self, blocks: Sequence[int], session: int) -> None:
        state = self.state
        for block in blocks:
            state[block] = RESERVED
        self.reserved_count += len(blocks)
        self.ledger.mark(blocks, self.generation, session << SESSION_SHIFT | RESERVED)
        self.ledger.records.erase(blocks)

    def commit(self, blocks: Sequence[int]) -> None:
        """RESERVED -> COMMITTED, each held once by the sequence that wrote it. They are recorded [L2]."""
        state, refs = self.state, self.refs
        for block in blocks:
            state[block] = COMMITTED
            refs[block] = 1
        self.reserved_count -= len(blocks)
        self.active_count += len(blocks)
        self.ledger.mark_low(blocks, HELD | COMMITTED)

    def shadow(self, block: int, canonical: int, session: int) -> None:
        """RESERVED -> SHADOW, holding the canonical block. It is recorded [L2]."""
        self.hold((canonical,))
        self.state[block] = SHADOW
        self.canonical[block] = canonical
        self.reserved_count -= 1
        self.active_count += 1
        self.ledger.mark((block,), self.generation, session << SESSION_SHIFT | SHADOW)

    def give_to(self, blocks: Iterable[int], session: int) -> None:
        """RESERVED and SHADOW blocks belong to another session, or to none (0) [L5]."""
        for block in blocks:
            self.ledger.mark((block,), self.generation, session << SESSION_SHIFT | self.state[block])

    def unshadow(self, block: int) -> int:
        """SHADOW -> FREE; returns the canonical block, whose hold passes to the caller."""
        self.active_count -= 1
        self.release_private((block,))
        return self.canonical.pop(block)

    def withdraw(self, blocks: Sequence[int], session: int) -> None:
        """COMMITTED and held once -> RESERVED for a session, one generation later; children before parents [L4]."""
        for block in blocks:
            self.refs[block] = 0
        self.active_count -= len(blocks)
        self._reserve_again(blocks, session)

    def withdraw_shadows(self, blocks: Sequence[int], session: int) -> None:
        """SHADOW -> RESERVED, one generation later; their canonical blocks lose these holders."""
        self.active_count -= len(blocks)
        self._reserve_again(blocks, session)
        self.unhold([self.canonical.pop(block) for block in blocks])

    def _reserve_again(self, blocks: Sequence[int], session: int) -> None:
        for block in blocks:
            self.state[block] = RESERVED
            self.generation[block] += 1
        self.reserved_count += len(blocks)
        self.ledger.mark(blocks, self.generation, session << SESSION_SHIFT | RESERVED)
        self.ledger.records.erase(blocks)

    def free_reserved(self, blocks: Sequence[int]) -> None:
        """RESERVED -> FREE."""
        self.reserved_count -= len(blocks)
        self.release_private(blocks)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """RESERVED or SHADOW -> QUARANTINED; a shadow keeps its hold."""
        for block in blocks:
            if self.state[block] == RESERVED:
                self.reserved_count -= 1
            else:
                self.active_count -= 1
            self.state[block] = QUARANTINED
            self.quarantined_count += 1

    def free_quarantined(self, blocks: Sequence[int]) -> list[int]:
        """QUARANTINED -> FREE; returns the canonical blocks whose holds pass to the caller."""
        self.quarantined_count -= len(blocks)
        self.release_private(blocks)
        return [self.canonical.pop(block) for block in blocks if block in self.canonical]

    def release_private(self, blocks: Sequence[int]) -> None:
        """Makes blocks FREE, one generation later ([P3])."""
        state, generation = self.state, self.generation
        for block in blocks:
            state[block] = FREE
            generation[block] += 1
        self.free.give(blocks)
        self.ledger.mark(blocks, generation, FREE)
        self.ledger.records.erase(blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds one holder to each of these COMMITTED blocks: a part of a chain, in order, or some that nobody holds."""
        refs = self.refs
        begun = blocks
        if blocks and not refs[blocks[0]]:
            # Whoever holds a block holds all before it: nobody holds any of these [P2].
            for block in blocks:
                refs[block] = 1
        else:
            begun = []
            for block in blocks:
                before = refs[block]
                refs[block] = before + 1
                if not before:
                    begun.append(block)
                elif before == 1:
                    self.shared_count += 1
        self.active_count += len(begun)
        revived = self._unpinned(begun)
        self.warm_count -= len(begun) - len(revived)
        if revived:
            self._revive(revived)

    def unhold(self, blocks: Iterable[int]) -> None:
        """Takes one holder from each COMMITTED block, in order: the deepest first."""
        refs = self.refs
        ended = []
        for block in blocks:
            after = refs[block] - 1
            refs[block] = after
            if not after:
                ended.append(block)
            elif after == 1:
                self.shared_count -= 1
        self.active_count -= len(ended)
        let_go = self._unpinned(ended)
        self.warm_count += len(ended) - len(let_go)
        if let_go:
            self._let_go(let_go)

    def pin(self, blocks: Iterable[int]) -> None:
        """Adds one warm pin to each COMMITTED block."""
        refs, pins = self.refs, self.pins
        revived = []
        for block in blocks:
            before = pins[block]
            pins[block] = before + 1
            if not before:
                self.pinned_count += 1
                if not refs[block]:
                    revived.append(block)
                    self.warm_count += 1
        if revived:
            self._revive(revived)

    def unpin(self, blocks: Iterable[int]) -> None:
        """Takes one warm pin from each COMMITTED block, in order: the deepest first."""
        refs, pins = self.refs, self.pins
        let_go = []
        for block in blocks:
            after = pins[block] - 1
            pins[block] = after
            if not after:
                self.pinned_count -= 1
                if not refs[block]:
                    self.warm_count -= 1
                    let_go.append(block)
        if let_go:
            self._let_go(let_go)

    def take_back_reserved(self, blocks: Sequence[int]) -> None:
        """QUARANTINED -> RESERVED: their session has resumed; the words still say so."""
        for block in blocks:
            self.state[block] = RESERVED
        self.quarantined_count -= len(blocks)
        self.reserved_count += len(blocks)

    def take_back_shadow(self, block: int, canonical: int) -> None:
        """QUARANTINED -> SHADOW; the caller's hold of the canonical block passes to it."""
        self.state[block] = SHADOW
        self.canonical[block] = canonical
        self.quarantined_count -= 1
        self.active_count += 1

    def restore_committed(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """After a restart: these are COMMITTED and cached, in the order of release."""
        for block in blocks:
            self.state[block] = COMMITTED
        self.evictable.publish_many(blocks, digests)
        self.evictable.insert_many(blocks)

    def restore_private(self, free: Sequence[int], quarantined: Sequence[int]) -> None:
        """After a restart: these are FREE, and these QUARANTINED; no others are free."""
        self.free = FreeRuns(self.first_block, 0)
        self.free.give(free)
        for block in quarantined:
            self.state[block] = QUARANTINED
        self.quarantined_count += len(quarantined)

    def _unpinned(self, blocks: Sequence[int]) -> Sequence[int]:
        pins = self.pins
        return [block for block in blocks if not pins[block]] if self.pinned_count else blocks

    def _revive(self, blocks: Sequence[int]) -> None:
        """Cached blocks have their first holder [L3]."""
        self.evictable.revive_many(blocks)
        self.ledger.mark_low(blocks, HELD | COMMITTED)

    def _let_go(self, blocks: Sequence[int]) -> None:
        """Blocks, the deepest first, have lost their last holder [L3]."""
        self.evictable.insert_many(blocks)
        self.ledger.mark_released(blocks, COMMITTED)
