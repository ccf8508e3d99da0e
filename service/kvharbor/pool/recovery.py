"""Recovery: the pool as its ledger tells it, for the process that comes next.

- COMMITTED blocks whose record is whole and whose chain leads to a namespace are in the tree again. Those that nobody
  held are evictable at once, in the order of their release. The recovery itself holds the others, and all above
  them, until each known session has resumed or is gone ([L3]).
- COMMITTED blocks of any other kind are misses: free at once, unless they were held. Then somebody may still read
  them, and they are quarantined as long as the recovery holds anything.
- RESERVED and SHADOW blocks of a known session wait for it, in quarantine. Of any other they are free at once.
- Warm pins hold what they held.
- Of a retired namespace what nobody held is freed, and its pins end [V3] [V4].

Every step stores the words and cells that the pool stores when it makes the same change, so that a recovery that is
killed can be recovered from as well.
"""

from collections.abc import Mapping
from itertools import pairwise

from kvharbor.pool import pins
from kvharbor.pool.blocks import COMMITTED, FREE, SHADOW
from kvharbor.pool.cells import NO_CELL, CellKind, Entry
from kvharbor.pool.ledger import GENERATION_SHIFT, HELD, MAX_SESSION, SESSION_SHIFT, STATE_MASK
from kvharbor.pool.lifecycle import settle
from kvharbor.pool.namespaces import FIRST_ROOT, NO_BLOCK, Namespace
from kvharbor.pool.results import Recovered
from kvharbor.pool.sequence import Session
from kvharbor.pool.state import Recovery, State
from kvharbor.pool.steps import finish
from kvharbor.pool.tree import PARENT_BYTES


def recover(state: State, sessions: Mapping[int, str]) -> Recovered:
    """Fills an empty pool from its ledger. `sessions` are those that may resume, with their tenants."""
    words = _Words(state)
    entries = list(state.ledger.cells.entries())
    namespaces = _restore_namespaces(state, entries)
    order = [block for namespace in namespaces for block in words.grow(namespace)]
    misses = [block for block in words.committed if not state.tree.contains(block)]
    shadows = words.shadows_of(sessions)
    extras_cells = state.ledger.take_extras(lambda block: state.tree.contains(block) or block in shadows)
    limbo = [block for block in misses if words.is_held(block)] if sessions else []
    lost = words.private_but(sessions) + sorted(set(misses).difference(limbo))

    held = _restore_committed(state, words, order)
    state.blocks.restore_private(words.free, [*limbo, *words.private_of(sessions)])
    state.blocks.release_private(lost)
    restored = [entry.cell for entry in entries if entry.kind == CellKind.PIN and _restore_pin(state, entry)]
    for namespace in namespaces:
        state.tenant(namespace.tenant).committed_block_count += namespace.block_count
        if namespace.block_count and namespace.cell == NO_CELL:
            state.namespaces.record(namespace)  # it had been emptied by a torn chain for a moment
        state.namespaces.disuse(namespace)
    state.ledger.cells.keep_only([*extras_cells, *restored, *[one.cell for one in state.namespaces if one.cell]])

    for session, tenant in sessions.items():
        unclaimed = set(words.private.get(session, ()))
        state.sessions[session] = Session(session, tenant, next_number=state.first_number, unclaimed=unclaimed)
    state.recovery = Recovery(held, limbo, set(sessions))
    state.revision += 1
    if state.namespaces.retired_count:
        state.free_retired(order[::-1])
    finish(settle(state, 0))
    return Recovered(
        committed_block_count=state.tree.block_count,
        private_block_count=sum(len(owner.unclaimed) for owner in state.sessions.values()),
        missed_block_count=len(misses),
        torn_block_count=words.torn_count,
        pin_count=len(state.pins),
    )


class _Words:
    """What the words say, sorted by state; generations go into their column."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._words = state.ledger.words.tolist()
        self.free: list[int] = []
        self.committed: list[int] = []
        self.private: dict[int, list[int]] = {}
        self.torn_count = 0
        # Of COMMITTED blocks: what they were keyed by, and which are below which node; most have one below them.
        self._keys: dict[int, bytes] = {}
        self._child: dict[int, int] = {}
        self._other_children: dict[int, list[int]] = {}
        for block in range(state.blocks.first_block, len(self._words)):
            word = self._words[block]
            if not word:
                self.free.append(block)
                continue
            state.blocks.generation[block] = word >> GENERATION_SHIFT
            kind = word & STATE_MASK
            if kind == FREE:
                self.free.append(block)
            elif kind == COMMITTED:
                self.committed.append(block)
            else:
                self.private.setdefault(word >> SESSION_SHIFT & MAX_SESSION, []).append(block)
        self._read_keys()

    def is_held(self, block: int) -> bool:
        """Whether somebody held a COMMITTED block."""
        return bool(self._words[block] & HELD)

    def private_of(self, sessions: Mapping[int, str]) -> list[int]:
        """Returns the private blocks of these sessions."""
        return [block for session in sessions for block in self.private.get(session, ())]

    def shadows_of(self, sessions: Mapping[int, str]) -> set[int]:
        """Returns the SHADOW blocks of these sessions: they have records too."""
        return {block for block in self.private_of(sessions) if self._words[block] & STATE_MASK == SHADOW}

    def private_but(self, sessions: Mapping[int, str]) -> list[int]:
        """Returns the private blocks of all other sessions."""
        return [block for session, blocks in self.private.items() if session not in sessions for block in blocks]

    def grow(self, namespace: Namespace) -> list[int]:
        """Puts all that hangs below a namespace into the tree; returns it, parents before children."""
        tree, generation = self._state.tree, self._state.blocks.generation
        order: list[int] = []
        pending = [(namespace.root, child) for child in self._below(namespace.root, 0)]
        while pending:
            parent, block = pending.pop()
            if parent < FIRST_ROOT and not tree.contains(parent):
                continue
            chain = [block]
            while children := self._below(chain[-1], generation[chain[-1]]):
                pending += [(chain[-1], child) for child in children[1:]]
                chain.append(children[0])
            order += self._insert(chain, parent, namespace)
        return order

    def _below(self, node: int, age: int) -> list[int]:
        """Takes the blocks whose records name this parent, as it is now."""
        child = self._child.pop(node, NO_BLOCK)
        if child == NO_BLOCK:
            return []
        children = [child, *self._other_children.pop(node, ())]
        return [child for child in children if self._state.ledger.parent_age(child) == age]

    def _read_keys(self) -> None:
        ledger, keys, place = self._state.ledger, self._keys, self._child.setdefault
        for block, key in zip(self.committed, ledger.keys(self.committed, self._state.blocks.generation), strict=True):
            if key is None:
                self.torn_count += not ledger.is_unrecorded(block)
                continue
            keys[block] = key
            parent = int.from_bytes(key[:PARENT_BYTES], "little")
            if place(parent, block) != block:
                self._other_children.setdefault(parent, []).append(block)

    def _insert(self, chain: list[int], parent: int, namespace: Namespace) -> list[int]:
        """Puts as much of a chain into the tree as its checksums vouch for."""
        tree, ledger, is_opaque = self._state.tree, self._state.ledger, namespace.is_opaque
        contents = [ledger.trimmed(self._keys.pop(block), is_opaque)[PARENT_BYTES:] for block in chain]
        digests = tree.insert_chain(chain, parent, contents, namespace)
        whole = len(digests)
        checksums = ledger.checksums(tree.keys(chain[:whole]), digests, is_opaque)
        recorded = [ledger.checksum(block) for block in chain[:whole]]
        if recorded != checksums:
            self.torn_count += 1
            whole = next(index for index, checksum in enumerate(checksums) if recorded[index] != checksum)
            tree.remove_all(chain[whole : len(digests)][::-1])
        return chain[:whole]


def _restore_namespaces(state: State, entries: list[Entry]) -> list[Namespace]:
    return [state.namespaces.restore(entry) for entry in entries if entry.kind == CellKind.NAMESPACE]


def _restore_committed(state: State, words: _Words, order: list[int]) -> list[int]:
    """Makes the blocks of the tree cached or held; returns the held ones, parents before children."""
    parents, stamps = state.tree.parent, state.ledger.stamps.tolist()
    is_held = bytearray(len(parents))
    for block in reversed(order):
        parent = parents[block]
        is_held[block] |= words.is_held(block)
        if parent < FIRST_ROOT:
            is_held[parent] |= is_held[block]
            stamps[parent] = max(stamps[parent], stamps[block])
    # Of equal stamps the child goes first, as it stands first here.
    cached = [block for block in reversed(order) if not is_held[block]]
    cached.sort(key=stamps.__getitem__)
    held = [block for block in order if is_held[block]]
    restored = [*cached, *reversed(held)]
    state.blocks.restore_committed(restored, [state.tree.digest_of(block) for block in restored])
    state.blocks.hold(held)
    ledger = state.ledger
    ledger.next_stamp = max(stamps, default=0) + 1
    if any(ledger.stamps[first] >= ledger.stamps[second] for first, second in pairwise(cached)):
        ledger.mark_released(cached, COMMITTED)
    return held


def _restore_pin(state: State, entry: Entry) -> bool:
    pin = pins.restore(state, entry)
    if pin is None:
        return False
    state.blocks.pin(pin.blocks)
    state.pins[pin.tenant, pin.name] = pin
    return True
