"""Who holds blocks: sequences, the sessions that have them, and warm pins."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvharbor.pool.cells import NO_CELL
from kvharbor.pool.engines import OTHERS
from kvharbor.pool.holdings import Holdings
from kvharbor.pool.misses import Miss
from kvharbor.pool.namespaces import Namespace
from kvharbor.pool.results import SequenceView

SEQUENCE_ENTRIES: Final = 128
"""What a sequence counts for beside its table: about a kibibyte."""
MAX_SHARED_ENTRIES: Final = 1 << 23
"""Entries of tables that a session may have beyond one for each block of the pool: 64 MiB of them."""


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that a tenant keeps warm. `promised` of its `block_count` blocks are still to be committed.

    `fingerprint` is of the Warmup that has made it: see `pins.fingerprint`.
    """

    tenant: str
    name: str
    namespace: Namespace
    fingerprint: bytes
    block_count: int
    blocks: list[int]
    promised: int
    expires_at: float | None
    sequence: "Sequence | None" = None
    cell: int = NO_CELL


# The arguments that a request_id stands for, by name; None where an earlier process was asked.
Fingerprint = dict[str, object]


@dataclass(slots=True, eq=False)
class Sequence:
    """cached_tokens <= computed_tokens <= token_count <= len(table) * block_tokens.

    table[:committed_blocks] holds COMMITTED blocks and SHADOWs of them, the rest RESERVED ones. `tail` holds the
    tokens from block `committed_blocks` on, as little-endian uint32: tokens of published blocks are in the tree,
    once. `chain_node` is the tree's node of the last committed block, or the namespace's root.
    """

    session: int
    number: int
    namespace: Namespace
    chain_node: int
    request_id: str
    group: str
    fingerprint: Fingerprint | None
    table: list[int]
    tail: bytearray
    token_count: int
    cached_tokens: int
    computed_tokens: int
    committed_blocks: int
    extras: dict[int, bytes]
    pin: Pin | None = None
    # What eviction takes the blocks for that it publishes; see `hints.py`.
    hint_class: int = 0
    # Why its Allocate has not matched more.
    miss: Miss | None = None
    # Copies under way from or into its blocks; they cannot be freed meanwhile.
    copy_count: int = 0
    # Called with the count of its tokens when it ends.
    tell_end: Callable[[int], None] | None = None
    # Where it stands in the table of writers, and when it has last got on there.
    writer_key: bytes | None = None
    progress_at: float = 0.0

    @classmethod
    def carrier(cls, session: int, namespace: Namespace, node: int, extras: dict[int, bytes]) -> "Sequence":
        """Makes one that has no name, for `in_flight`: it holds for a session what a block call is about."""
        return cls(
            session=session,
            number=0,
            namespace=namespace,
            chain_node=node,
            request_id="",
            group="",
            fingerprint=None,
            table=[],
            tail=bytearray(),
            token_count=0,
            cached_tokens=0,
            computed_tokens=0,
            committed_blocks=0,
            extras=extras,
        )

    @property
    def entry_count(self) -> int:
        """What it counts for in the tables of its session [P8]."""
        return len(self.table) + SEQUENCE_ENTRIES

    def drop_published_extras(self) -> None:
        """Forgets the extra keys of blocks that are in the tree, which has them."""
        if self.extras:
            self.extras = {block: extra for block, extra in self.extras.items() if block >= self.committed_blocks}

    def name(self) -> str:
        """Returns the handle as errors show it."""
        return f"{self.session}.{self.number}"

    def view(self, generation: list[int], block_tokens: int) -> SequenceView:
        """Returns the present state."""
        table = self.table
        return SequenceView(
            self.session,
            self.number,
            array("I", table),
            array("Q", [generation[block] for block in table]),
            self.cached_tokens,
            self.computed_tokens,
            self.token_count,
            len(table) * block_tokens,
            self.request_id,
            self.group,
            self.miss,
        )


@dataclass(slots=True, eq=False)
class Session:
    """One engine. `ended`: it may call no more. `quiet`: none of its processes touches a block any more.

    `unclaimed` are private blocks that it had before a restart and has not named yet; they are QUARANTINED.
    `blocks` are those that it holds by itself. `engine` is its number among the `engines.Engines`. `entry_count` is the
    sum over its sequences, `given_entry_count` that over those that it has handed off and nobody has adopted [P8].
    """

    session: int
    tenant: str
    ended: bool = False
    writers_quiet: bool = False
    quiet: bool = False
    next_number: int = 1
    unclaimed: set[int] = field(default_factory=set)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    by_request: dict[str, Sequence] = field(default_factory=dict)
    by_group: dict[str, set[int]] = field(default_factory=dict)
    blocks: Holdings = field(default_factory=Holdings)
    engine: int = OTHERS
    entry_count: int = 0
    given_entry_count: int = 0

    @property
    def table_block_count(self) -> int:
        """Blocks in the tables of its sequences, in each for itself."""
        return self.entry_count - SEQUENCE_ENTRIES * len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in, under its number, request_id and group."""
        self.sequences[sequence.number] = sequence
        self.entry_count += sequence.entry_count
        if sequence.request_id:
            self.by_request[sequence.request_id] = sequence
        if sequence.group:
            self.by_group.setdefault(sequence.group, set()).add(sequence.number)

    def remove(self, sequence: Sequence) -> None:
        """Lets a sequence go; its number is never used again."""
        del self.sequences[sequence.number]
        self.entry_count -= sequence.entry_count
        if sequence.request_id:
            del self.by_request[sequence.request_id]
        if sequence.group:
            members = self.by_group[sequence.group]
            members.discard(sequence.number)
            if not members:
                del self.by_group[sequence.group]

    def take_number(self) -> int:
        """Returns a fresh sequence number."""
        number = self.next_number
        self.next_number += 1
        return number
