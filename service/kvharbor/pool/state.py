"""All state of a pool, and the few steps that several operations share."""

from array import array
from collections.abc import Sequence as Run
from dataclasses import dataclass

from kvharbor.pool.awaiting import Awaiting
from kvharbor.pool.block_runs import BlockRun
from kvharbor.pool.blocks import Blocks
from kvharbor.pool.engines import Engines
from kvharbor.pool.errors import InvariantViolation, PoolExhausted, SequenceBusy, SequenceNotFound
from kvharbor.pool.events import BlocksRemoved, Event
from kvharbor.pool.evicted import ADMINISTRATOR, Eviction
from kvharbor.pool.hints import HintClasses
from kvharbor.pool.history import History
from kvharbor.pool.ledger import Ledger
from kvharbor.pool.marks import Marks
from kvharbor.pool.namespaces import NO_BLOCK, Namespace, Namespaces
from kvharbor.pool.policies import policy_of
from kvharbor.pool.results import PoolConfig, SequenceView
from kvharbor.pool.sequence import MAX_SHARED_ENTRIES, Pin, Sequence, Session
from kvharbor.pool.stats import Counters, TenantCounters
from kvharbor.pool.steps import Steps
from kvharbor.pool.tree import PrefixTree
from kvharbor.pool.writers import Writers


@dataclass(slots=True, eq=False)
class Handoff:
    """A sequence that belongs to a token, whatever becomes of `source`, the (session, number) it came from."""

    sequence: Sequence
    tenant: str
    expires_at: float
    source: tuple[int, int]


@dataclass(slots=True, eq=False)
class Recovery:
    """A holder: of committed blocks that sessions of the earlier process may be reading, parents first.

    `limbo` are blocks that somebody may be reading too, but whose record is of no use: they are QUARANTINED.
    `awaited` are the sessions that have neither resumed nor gone.
    """

    held: list[int]
    limbo: list[int]
    awaited: set[int]


class State:
    """What the operations work on. Each sequence is in one place: a session, a hand-off, or `in_flight`."""

    def __init__(self, config: PoolConfig, ledger: Ledger, *, first_number: int = 1, first_revision: int = 0) -> None:
        self.config = config
        self.block_tokens = config.block_tokens
        self.slice_blocks = config.slice_blocks
        self.ledger = ledger
        self.namespaces = Namespaces(config.identity, ledger.cells)
        self.tree = PrefixTree(config.scratch_blocks + config.block_count, ledger.records, self.namespaces)
        self.blocks = Blocks(config.scratch_blocks, config.block_count, policy_of(config, self.tree), ledger)
        self.hint_classes = HintClasses()
        self.engines = Engines(config.scratch_blocks + config.block_count)
        self.awaiting = Awaiting()
        self.writers = Writers(self.tree, self.blocks.generation, config.block_tokens, self.awaiting)
        self.marks = Marks(self.writers, self.namespaces, config.block_count)
        self.sessions: dict[int, Session] = {}
        # What the tables of one session's sequences may have in all.
        self.most_entries = config.block_count + MAX_SHARED_ENTRIES
        self.handoffs: dict[str, Handoff] = {}
        # The token of each hand-off, by where its sequence came from.
        self.handoff_tokens: dict[tuple[int, int], str] = {}
        # Sequences that an unfinished operation is building up or taking down.
        self.in_flight: set[Sequence] = set()
        self.pins: dict[tuple[str, str], Pin] = {}
        # Pins whose name is free again and whose blocks are still being let go.
        self.ending_pins: set[Pin] = set()
        self.warm_budget = int(config.block_count * config.warm_budget_ratio)
        # Blocks that unfinished warm-ups will pin; they count against the budget from the reply on.
        self.promised = 0
        # Blocks that admitted operations have still to take, out of free and cached ones.
        self.claimed = 0
        self.revision = first_revision
        # Numbers of sequences begin here in each session; those below may be an earlier process's.
        self.first_number = first_number
        # What a recovered pool keeps until every session that was known then has resumed or is gone.
        self.recovery: Recovery | None = None
        self.events: list[Event] = []
        self.counters = Counters()
        self.tenants: dict[str, TenantCounters] = {}
        # The shell's clock, for what is told and for whose writer has stalled; no block changes its state by it.
        self.now = 0.0
        self.history = History(config.block_count) if config.history else None

    @property
    def available(self) -> int:
        """Blocks that can be promised: free and cached, less what is claimed. Never negative."""
        return self.blocks.free.count + self.blocks.cached_count - self.claimed

    def tenant(self, name: str) -> TenantCounters:
        """Returns a tenant's counters, made if need be."""
        counters = self.tenants.get(name)
        if counters is None:
            counters = self.tenants[name] = TenantCounters()
        return counters

    def session(self, number: int) -> Session:
        """Returns a session that may call. The shell opens it before and never uses it after its end."""
        owner = self.sessions[number]
        if owner.ended:
            raise InvariantViolation(rule="G3", detail=f"session {number} makes a call after its end")
        return owner

    def sequence(self, session: int, number: int) -> Sequence:
        """Returns a live sequence of a live session."""
        owner = self.sessions.get(session)
        sequence = owner.sequences.get(number) if owner is not None and not owner.ended else None
        if sequence is None:
            raise SequenceNotFound(sequence_id=f"{session}.{number}")
        return sequence

    def forget_if_over(self, owner: Session) -> None:
        """Forgets a session that has ended and holds nothing any more."""
        if owner.quiet and not owner.sequences and not owner.blocks:
            self.sessions.pop(owner.session, None)

    def count_request(self, owner: Session, prompt_token_count: int, reused: Run[int]) -> None:
        """Counts a granted request of a session, which has found these blocks in the index [U2]."""
        counters, tenant, reused_token_count = self.counters, self.tenant(owner.tenant), len(reused) * self.block_tokens
        counters.allocate_count += 1
        counters.hit_count += bool(reused)
        counters.prompt_token_count += prompt_token_count
        tenant.prompt_token_count += prompt_token_count
        counters.reused_token_count += reused_token_count
        tenant.reused_token_count += reused_token_count
        self.engines.granted(owner.engine, prompt_token_count, reused)

    def refuse_if_copying(self, sequence: Sequence) -> None:
        """Refuses to touch a sequence while the bytes of its blocks are being copied."""
        if sequence.copy_count:
            raise SequenceBusy(sequence_id=sequence.name())

    def private_blocks(self, sequence: Sequence) -> list[int]:
        """Returns the blocks of a table that are its own: not committed, or shadows."""
        table, committed, canonical = sequence.table, sequence.committed_blocks, self.blocks.canonical
        private = table[committed:]
        if canonical:
            private += [block for block in table[:committed] if block in canonical]
        return private

    def move(self, sequence: Sequence, *, session: int, number: int) -> None:
        """Gives a sequence to another session, or to none, with its private blocks."""
        self.writers.remove(sequence)
        sequence.session, sequence.number = session, number
        self.writers.place(sequence, self.now)
        self.blocks.give_to(self.private_blocks(sequence), session)
        self.revision += 1

    def run(self, blocks: Run[int]) -> BlockRun:
        """Returns blocks with their present generations."""
        generation = self.blocks.generation
        return BlockRun(array("I", blocks), array("Q", [generation[block] for block in blocks]))

    def view(self, sequence: Sequence) -> SequenceView:
        """Returns a sequence's present state."""
        return sequence.view(self.blocks.generation, self.block_tokens)

    def refuse(self, needed: int, available: int) -> PoolExhausted:
        """Returns the error that says what is needed and what holds the rest."""
        self.counters.refused_count += 1
        blocks = self.blocks
        return PoolExhausted(
            needed_block_count=needed,
            available_block_count=available,
            free_block_count=blocks.free.count,
            cached_block_count=blocks.cached_count,
            reserved_block_count=blocks.reserved_count,
            active_block_count=blocks.active_count,
            warm_block_count=blocks.warm_count,
            quarantined_block_count=blocks.quarantined_count,
            usable_block_count=blocks.total_count,
        )

    def unheld_count(self, run: Run[int]) -> int:
        """Returns how many of these committed blocks are evictable: holding them takes that much room."""
        refs, pins = self.blocks.refs, self.blocks.pins
        return sum(1 for block in run if not refs[block] and not pins[block])

    def fill(
        self, table: list[int], block_count: int, session: int, tenant: str, after: int | None = None
    ) -> Steps[None]:
        """Appends claimed blocks to a table, evicting only the shortfall ([P5]); cannot fail.

        An empty one begins behind the block `after`, if it can.
        """
        while block_count:
            part = min(self.slice_blocks, block_count)
            if table:
                after = table[-1]
            shortfall = part - self.blocks.free.count
            if shortfall > 0:
                victims = self.blocks.evictable.pop_many(shortfall)
                part -= shortfall - len(victims)
                self.unindex(victims, session, tenant)
                table += self.blocks.reserve_evicted(victims, after, session)
            else:
                table += self.blocks.reserve(part, after, session)
            self.claimed -= part
            block_count -= part
            self.revision += 1
            if block_count:
                yield

    def evict(self, block_count: int) -> int:
        """Gives up the next cached blocks in the policy's order; returns how many, which may be fewer."""
        victims = self.blocks.evictable.pop_many(block_count)
        self.forget(victims)
        return len(victims)

    def forget(self, victims: Run[int], session: int = ADMINISTRATOR, tenant: str = "") -> None:
        """COMMITTED -> FREE for blocks that have left the eviction policy, children before parents."""
        self.blocks.release_private(victims)
        self.unindex(victims, session, tenant)

    def unhold(self, run: Run[int], namespace: Namespace | None = None) -> None:
        """Takes one holder from each of these blocks, the deepest first; all are in `namespace` if one is named."""
        self.blocks.unhold(run)
        if self.namespaces.retired_count and (namespace is None or namespace.is_retired):
            self.free_retired(run)

    def free_retired(self, run: Run[int]) -> None:
        """COMMITTED -> FREE for those of these blocks, children before parents, that nobody may find again [V1].

        They are those of retired namespaces that nobody holds. One with another block behind it stays: a retirement is
        still on the way to both.
        """
        tree, evictable = self.tree, self.blocks.evictable
        victims: dict[int, None] = {}
        for block in run:
            if (
                block in evictable
                and tree.namespace_of(block).is_retired
                and tree.child_but(block, victims) == NO_BLOCK
            ):
                victims[block] = None
        if victims:
            evictable.remove_many(victims)
            self.blocks.release_private(list(victims))
            self.unindex(list(victims), ADMINISTRATOR, "", is_eviction=False)

    def unindex(self, victims: Run[int], session: int, tenant: str, *, is_eviction: bool = True) -> None:
        """Takes blocks out of the tree, children before parents, and tells of it."""
        removed = self.tree.remove_all(victims)
        if is_eviction:
            self.counters.evicted_block_count += len(victims)
        self.revision += 1
        if self.history is not None:
            self.history.gave_up(victims, removed, Eviction(self.now, session, tenant), is_eviction=is_eviction)
        for namespace, digests in removed:
            self.tenant(namespace.tenant).committed_block_count -= len(digests)
            self.events.append(BlocksRemoved(self.revision, namespace.tenant, tuple(digests)))
