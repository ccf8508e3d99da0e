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
from operator import ge
from typing import Final

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

_HELD_SHIFT: Final = HELD.bit_length() - 1
_MOST_AT_ONCE: Final = 1024
"""Blocks of a chain that are put into the tree together: what is copied for that stays small."""


def recover(state: State, sessions: Mapping[int, str]) -> Recovered:
    """Fills an empty pool from its ledger. `sessions` are those that may resume, with their tenants."""
    words = _Words(state)
    entries = list(state.ledger.cells.entries())
    namespaces = _restore_namespaces(state, entries)
    order = [block for namespace in namespaces for block in words.grow(namespace)]
    parents = state.tree.parent
    misses = [block for block in words.committed if parents[block] == NO_BLOCK]
    shadows = words.shadows_of(sessions)
    extras_cells = state.ledger.records.keep_extras(lambda block: state.tree.contains(block) or block in shadows)
    is_held = words.held()
    limbo = [block for block in misses if is_held[block]] if sessions else []
    lost = words.private_but(sessions) + sorted(set(misses).difference(limbo))

    held = _restore_committed(state, order, is_held)
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
        self._words: list[int] = state.ledger.words.tolist()
        self.free: list[int] = []
        self.committed: list[int] = []
        self.private: dict[int, list[int]] = {}
        first = state.blocks.first_block
        state.blocks.generation[first:] = [word >> GENERATION_SHIFT or 1 for word in self._words[first:]]
        for block, word in enumerate(self._words[first:], start=first):
            kind = word & STATE_MASK
            if kind == COMMITTED:
                self.committed.append(block)
            elif kind == FREE:
                self.free.append(block)
            else:
                self.private.setdefault(word >> SESSION_SHIFT & MAX_SESSION, []).append(block)
        state.ledger.records.take_up_extras()
        torn = state.ledger.records.not_whole(self.committed, state.blocks.generation)
        self.torn_count = sum(1 for block in torn if not state.ledger.records.is_unrecorded(block))
        self._parent_ages: list[int] = state.ledger.records.parent_ages.tolist()
        # The only block whose record names a block as its parent; all of them where there are several, and of roots.
        self._child = [NO_BLOCK] * len(self._words)
        self._children: dict[int, list[int]] = {}
        self._read_parents(set(torn))

    def held(self) -> bytearray:
        """Returns which blocks have a word that says `held`: 1 for each of them."""
        return bytearray([word >> _HELD_SHIFT & 1 for word in self._words])

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
        only_child, children, parent_ages = self._child, self._children, self._parent_ages
        order: list[int] = []
        pending = [(namespace.root, 0, child) for child in children.get(namespace.root, ())]
        while pending:
            parent, age, block = pending.pop()
            if parent_ages[block] != age or (parent < FIRST_ROOT and not tree.contains(parent)):
                continue
            chain = [block]
            while (child := only_child[block]) != NO_BLOCK and parent_ages[child] == generation[block]:
                if len(chain) == _MOST_AT_ONCE:
                    pending.append((block, generation[block], child))
                    break
                chain.append(child)
                block = child
            pending += [(block, generation[block], child) for child in children.get(block, ())]
            order += self._insert(chain, parent, namespace)
        return order

    def _read_parents(self, torn: set[int]) -> None:
        parents = self._state.ledger.records.parents.tolist()
        only_child, children, end = self._child, self._children, len(self._words)
        for block in self.committed:
            parent = parents[block]
            if torn and block in torn:
                continue
            if parent >= end or parent in children:
                children.setdefault(parent, []).append(block)
            elif only_child[parent] == NO_BLOCK:
                only_child[parent] = block
            else:
                children[parent] = [only_child[parent], block]
                only_child[parent] = NO_BLOCK

    def _insert(self, chain: list[int], parent: int, namespace: Namespace) -> list[int]:
        """Puts as much of a chain into the tree as its records vouch for."""
        tree, records, is_opaque = self._state.tree, self._state.ledger.records, namespace.is_opaque
        contents = records.all_recorded(chain, is_opaque=is_opaque)
        digests = tree.insert_chain(chain, parent, contents, namespace)
        if not digests:
            return []
        whole = records.vouched_count(chain, parent, contents, digests, is_opaque=is_opaque)
        if whole < len(chain):
            self.torn_count += 1
            tree.remove_all(chain[whole:][::-1])
        return chain[:whole]


def _restore_namespaces(state: State, entries: list[Entry]) -> list[Namespace]:
    return [state.namespaces.restore(entry) for entry in entries if entry.kind == CellKind.NAMESPACE]


def _restore_committed(state: State, order: list[int], is_held: bytearray) -> list[int]:
    """Makes the blocks of the tree cached or held; returns the held ones, parents before children."""
    parents, ledger = state.tree.parent, state.ledger
    recorded: list[int] = ledger.stamps.tolist()
    stamps = recorded[:]
    for block in reversed(order):
        parent = parents[block]
        if parent < FIRST_ROOT:
            if is_held[block]:
                is_held[parent] = 1
            elif stamps[parent] < stamps[block]:
                stamps[parent] = stamps[block]
    # Of equal stamps the child goes first, as it stands first here.
    cached = [block for block in reversed(order) if not is_held[block]]
    cached.sort(key=stamps.__getitem__)
    held = [block for block in order if is_held[block]]
    restored = [*cached, *reversed(held)]
    state.blocks.restore_committed(restored, ledger.records.digests(restored))
    state.blocks.hold(held)
    ledger.next_stamp = max(recorded, default=0) + 1
    in_order = [recorded[block] for block in cached]
    if any(map(ge, in_order, in_order[1:])):
        ledger.mark_released(cached, COMMITTED)
    return held


def _restore_pin(state: State, entry: Entry) -> bool:
    pin = pins.restore(state, entry)
    if pin is None:
        return False
    state.blocks.pin(pin.blocks)
    state.pins[pin.tenant, pin.name] = pin
    return True
