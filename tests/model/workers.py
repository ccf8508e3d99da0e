"""Workers and the bytes they write, as a pool's other side: what each may read must be what was written for it.

A stamp stands for the KV bytes of a block: everything that they depend on. A worker stamps what it computes, and
after every slice of any operation the harbour is checked: each reader finds its own stamps, no two writers share
a block, nothing committed changes, and the events tell the whole index.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvharbor.pool import ExtraKey, Fork, Pool, SequenceView
from kvharbor.pool.blocks import COMMITTED, RESERVED
from kvharbor.pool.events import BlocksRemoved, BlocksStored
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.steps import Steps
from kvharbor.pool.tree import PARENT_BYTES

Stamp = tuple[Any, ...]
NamespaceKey = tuple[str, str, str, bytes, str]


@dataclass(eq=False)
class Reader:
    """One sequence as its worker knows it."""

    number: int
    namespace: NamespaceKey
    tokens: list[int]
    extras: dict[int, bytes]
    table: list[int]
    computed: int
    request_id: str = ""
    group: str = ""
    asked: object = None
    shadows: dict[int, int] = field(default_factory=dict)

    def stamp(self, position: int, block_tokens: int) -> Stamp:
        """What the block at `position` holds once `computed` tokens are written."""
        end = min((position + 1) * block_tokens, self.computed)
        keys = tuple(sorted((offset, value) for offset, value in self.extras.items() if offset < end))
        return (self.namespace, tuple(self.tokens[:end]), keys)


@dataclass(eq=False)
class Own:
    """A block that a session holds by itself: leased without a stamp, a shadow with a canonical block, else committed.

    `prefix` are the tokens of the prompt up to its end, with their extra keys.
    """

    generation: int
    stamp: Stamp | None = None
    prefix: tuple[int, ...] = ()
    extras: dict[int, bytes] = field(default_factory=dict)
    canonical: int | None = None


@dataclass(eq=False)
class Running:
    """An operation between two slices."""

    steps: Steps[Any]
    ended: Callable[[Any], None]
    refusals: tuple[type[Exception], ...]


@dataclass(eq=False)
class Worker:
    """One session: its sequences, the operation under way, and forks whose copies are under way.

    `own` are the blocks that it holds by itself; those that are `uncertain` may be in another generation already.
    """

    session: int
    tenant: str
    readers: dict[int, Reader] = field(default_factory=dict)
    own: dict[int, Own] = field(default_factory=dict)
    uncertain: set[int] = field(default_factory=set)
    running: Running | None = None
    forks: list[tuple[Fork, list[Reader]]] = field(default_factory=list)
    is_lost: bool = False
    writes_no_more: bool = False

    def leased(self) -> list[int]:
        """The blocks that it may write, in its own hands."""
        return [block for block, own in self.own.items() if own.stamp is None]

    def is_copying(self, reader: Reader) -> bool:
        """Whether a copy from or into the sequence is under way."""
        return any(reader.number in (made.source, *made.children) for made, _ in self.forks)


class Harbour:
    """A pool, the memory of its blocks, and the workers."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.block_tokens = pool.config.block_tokens
        self.memory: dict[int, Stamp] = {}
        self.workers: list[Worker] = []
        self.given: dict[str, tuple[str, float, Reader]] = {}
        self.index: dict[tuple[str, bytes], tuple[int, int]] = {}
        # Every content that was ever published, by block and generation ([P3]).
        self.published: dict[tuple[int, int], Stamp] = {}
        self.revision = 0

    # What workers do to the memory

    def write(self, reader: Reader, before: int) -> None:
        """Stamps the tokens from `before` to `computed`."""
        for position in range(before // self.block_tokens, -(-reader.computed // self.block_tokens)):
            block = reader.table[position]
            assert self.pool._state.blocks.state[block] == RESERVED, "[G2] a worker would write into a shared block"
            self.memory[block] = reader.stamp(position, self.block_tokens)

    def scribble(self, worker: Worker) -> None:
        """A lost process writes into every block that it could still write when its session ended."""
        for reader in worker.readers.values():
            for position, block in enumerate(reader.table):
                if self.is_private(reader, position):
                    self.memory[block] = ("scribble", worker.session)
        for block, own in worker.own.items():
            if own.stamp is None or own.canonical is not None:
                self.memory[block] = ("scribble", worker.session)

    def is_private(self, reader: Reader, position: int) -> bool:
        """Whether the block is the worker's own by what it knows: neither a hit nor published."""
        block = reader.table[position]
        return position in reader.shadows or self.pool._state.blocks.state[block] != COMMITTED

    def forget_private(self, worker: Worker) -> None:
        """No process of a lost worker touches what was private; what is committed they may still read."""
        owner = self.pool._state.sessions.get(worker.session)
        if owner is None or owner.quiet:
            return
        for block, own in list(worker.own.items()):
            if own.stamp is None or own.canonical is not None:
                del worker.own[block]
            if own.canonical is not None:
                age = self.pool._state.blocks.generation[own.canonical]
                worker.own[own.canonical] = Own(age, own.stamp, own.prefix, own.extras)
        for reader in worker.readers.values():
            if not worker.is_copying(reader):
                sequence = owner.sequences[reader.number]
                canonical = self.pool._state.blocks.canonical
                table = sequence.table[: sequence.committed_blocks]
                reader.table = [canonical.get(block, block) for block in table]
                reader.computed = len(reader.table) * self.block_tokens
                del reader.tokens[reader.computed :]
                reader.shadows.clear()

    def copy(self, made: Fork, copy_count: int) -> None:
        """Copies whole blocks, as late as the pool has to bear."""
        for source, destination in made.copies[:copy_count]:
            assert self.pool._state.blocks.state[destination] != COMMITTED, "[G2] a copy lands in a shared block"
            self.memory[destination] = self.memory[source]

    def reader(self, view: SequenceView, known: Reader) -> Reader:
        """Makes `known` the sequence of a view and reads what it says is there."""
        known.number, known.table = view.number, list(view.block_ids)
        known.computed, known.request_id, known.group = view.computed_tokens, view.request_id, view.group
        assert len(known.tokens) == view.token_count
        assert view.capacity_tokens == len(known.table) * self.block_tokens
        assert list(view.generations) == [self.pool._state.blocks.generation[block] for block in known.table]
        self._read(known, view.session)
        return known

    # What must hold after every slice

    def check(self) -> None:
        """Every promise that can be seen from outside, then the pool's own check."""
        self._check_readers()
        self._check_own()
        self._check_writers()
        self._check_committed()
        self._check_events()
        self.pool.check_invariants()

    def _read(self, reader: Reader, session: int) -> None:
        for position in range(-(-reader.computed // self.block_tokens)):
            found = self.memory[reader.table[position]]
            # What a lost process scribbled is in its own blocks, and in copies of them that it never gets.
            is_own_scribble = found == ("scribble", session)
            assert is_own_scribble or found == reader.stamp(position, self.block_tokens), "[G1] wrong bytes"

    def _all_readers(self) -> list[tuple[Reader, int]]:
        held = [(reader, worker.session) for worker in self.workers for reader in worker.readers.values()]
        return held + [(reader, 0) for _, _, reader in self.given.values()]

    def _check_readers(self) -> None:
        for reader, session in self._all_readers():
            self._read(reader, session)

    def _check_writers(self) -> None:
        writable: set[int] = set()
        for reader, _ in self._all_readers():
            own = [block for position, block in enumerate(reader.table) if self.is_private(reader, position)]
            assert writable.isdisjoint(own), "[G2] two sequences may write the same block"
            writable.update(own)
        state = self.pool._state.blocks.state
        for worker in self.workers:
            own = [block for block in worker.own if state[block] != COMMITTED]
            assert writable.isdisjoint(own), "[B1] a block of the session itself is somebody else's too"
            writable.update(own)

    def _check_own(self) -> None:
        for worker in self.workers:
            for block, own in worker.own.items():
                is_own_scribble = self.memory.get(block) == ("scribble", worker.session)
                assert own.stamp is None or is_own_scribble or self.memory[block] == own.stamp, "[G1] wrong bytes"
            owner = self.pool._state.sessions.get(worker.session)
            if owner is None or worker.is_lost or worker.running is not None:
                continue
            held = owner.blocks
            shadows = {block for block, own in worker.own.items() if own.canonical is not None}
            assert (held.fresh, held.leased, held.shadows) == ([], set(worker.leased()), shadows), "[B1]"
            named = worker.own.keys() - held.leased - shadows
            assert held.behind.keys() - held.lingering == named, "[B1] it holds other committed blocks"

    def _check_committed(self) -> None:
        state = self.pool._state
        for namespace in state.namespaces:
            for block in state.tree.descend(namespace.root):
                stamp = self._stamp_of(block)
                assert self.memory[block] == stamp, "[G2] a committed block is not what it was"
                named = self.published.setdefault((block, state.blocks.generation[block]), stamp)
                assert named == stamp, "[P3] a generation has named two contents"

    def _stamp_of(self, block: int) -> Stamp:
        tree, chain = self.pool._state.tree, []
        namespace, node = tree.namespace_of(block), block
        while node < FIRST_ROOT:
            chain.append(tree.content_of(node))
            node = tree.parent[node]
        if namespace.is_opaque:
            return (namespace.key, tuple(reversed(chain)), ())
        tokens: list[int] = []
        keys: list[tuple[int, bytes]] = []
        for content in reversed(chain):
            first, split = len(tokens), 4 * self.block_tokens
            tokens += memoryview(content[:split]).cast("I")
            keys += [(first + offset, value) for offset, value in _decode(content[split:])]
        return (namespace.key, tuple(tokens), tuple(keys))

    def _check_events(self) -> None:
        for event in self.pool.drain_events():
            assert self.revision <= event.revision <= self.pool.revision
            self.revision = event.revision
            if isinstance(event, BlocksStored):
                placed = zip(event.digests, event.block_ids, event.generations, strict=True)
                for digest, block, generation in placed:
                    assert (event.tenant, digest) not in self.index
                    self.index[event.tenant, digest] = (block, generation)
            elif isinstance(event, BlocksRemoved):
                for digest in event.digests:
                    del self.index[event.tenant, digest]
        listed = {
            (chain.tenant, digest): (block, generation)
            for chain in self.pool.index_chains()
            for digest, block, generation in zip(chain.digests, chain.block_ids, chain.generations, strict=True)
        }
        assert listed == self.index, "the events do not tell the index"


def _decode(extras: bytes) -> list[tuple[int, bytes]]:
    keys = []
    while extras:
        offset, size = (int.from_bytes(extras[at : at + 8], "little") for at in (0, PARENT_BYTES))
        keys.append((offset, extras[16 : 16 + size]))
        extras = extras[16 + size :]
    return keys


def extra_keys(extras: dict[int, bytes], first: int = 0) -> tuple[ExtraKey, ...]:
    """The keys from token `first` on, as the API takes them."""
    return tuple(ExtraKey(offset, value) for offset, value in sorted(extras.items()) if offset >= first)
