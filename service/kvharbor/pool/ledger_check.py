"""The rules of the ledger [L1] to [L10], checked by comparing all of it with the pool in memory."""

from typing import NoReturn

from kvharbor.pool.blocks import COMMITTED, FREE, QUARANTINED, SCRATCH, SHADOW
from kvharbor.pool.cells import NO_CELL
from kvharbor.pool.errors import InvariantViolation
from kvharbor.pool.ledger import GENERATION_SHIFT, HELD, MAX_SESSION, SESSION_SHIFT, STATE_MASK
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.sequence import Sequence
from kvharbor.pool.state import State


def check_ledger(state: State, sequences: list[Sequence]) -> None:
    """Raises InvariantViolation for the first thing in which the ledger is not what memory says."""
    _check_words(state, sequences)
    _check_records(state)
    _check_stamps(state)
    _check_cells(state)


def _fail(rule: str, detail: str) -> NoReturn:
    raise InvariantViolation(rule=rule, detail=detail)


def _check_words(state: State, sequences: list[Sequence]) -> None:
    blocks, words = state.blocks, state.ledger.words
    owners = {block: sequence.session for sequence in sequences for block in state.private_blocks(sequence)}
    for owner in state.sessions.values():
        owners |= dict.fromkeys([*owner.unclaimed, *owner.blocks.private()], owner.session)
    limbo = set(state.recovery.limbo) if state.recovery is not None else set()
    for block, kind in enumerate(blocks.state):
        word = words[block] or 1 << GENERATION_SHIFT
        if kind == SCRATCH or block in limbo:
            continue
        if word >> GENERATION_SHIFT != blocks.generation[block]:
            _fail("L6", f"block {block}: generation {blocks.generation[block]}, its word {word:#x}")
        stored = word & STATE_MASK
        if stored in (FREE, COMMITTED) if kind == QUARANTINED else stored != kind:
            _fail("L1", f"block {block} in state {kind} has the word {word:#x}")
        if bool(word & HELD) != (kind == COMMITTED and block not in blocks.evictable):
            _fail("L3", f"block {block} in state {kind} has the word {word:#x}")
        if stored not in (FREE, COMMITTED) and word >> SESSION_SHIFT & MAX_SESSION != owners[block]:
            _fail("L5", f"block {block} of session {owners[block]} has the word {word:#x}")


def _check_records(state: State) -> None:
    blocks, tree, records = state.blocks, state.tree, state.ledger.records
    for block, kind in enumerate(blocks.state):
        if kind not in (COMMITTED, SHADOW) or records.is_unrecorded(block):
            continue
        twin = blocks.canonical[block] if kind == SHADOW else block
        parent = tree.parent[twin]
        parent_age = 0 if parent >= FIRST_ROOT else blocks.generation[parent]
        is_opaque, digest = tree.namespace_of(twin).is_opaque, tree.digest_of(twin)
        content = tree.content_of(twin)
        if (
            records.recorded(block, blocks.generation, is_opaque=is_opaque) != content
            or (records.parents[block], records.parent_ages[block]) != (parent, parent_age)
            or not records.vouched_count([block], parent, [content], [digest], is_opaque=is_opaque)
        ):
            _fail("L2", f"block {block} in state {kind} is not what its record says")


def _check_stamps(state: State) -> None:
    stamps, parents = state.ledger.stamps, state.tree.parent
    evictable = list(state.blocks.evictable)
    if len({stamps[block] for block in evictable}) != len(evictable):
        _fail("L3", "two blocks were released at the same place")
    for block in evictable:
        parent, stamp = parents[block], stamps[block]
        if not 0 < stamp < state.ledger.next_stamp:
            _fail("L3", f"block {block} has the stamp {stamp}, the next one is {state.ledger.next_stamp}")
        if parent < FIRST_ROOT and parent in state.blocks.evictable and stamps[parent] < stamp:
            _fail("L3", f"block {block} has the stamp {stamp}, its parent {parent} an older one")


def _check_cells(state: State) -> None:
    cells = state.ledger.cells
    refused = cells.refused_count
    for namespace in state.namespaces:
        entry = cells.read(namespace.cell) if namespace.cell != NO_CELL else None
        if namespace.block_count and entry is None and not refused:
            _fail("L9", f"namespace {namespace.root} has blocks and is not in the ledger")
        if entry is not None and (entry.words[0] != namespace.root or not namespace.block_count):
            _fail("L9", f"namespace {namespace.root} is in the ledger as {entry.words[0]}")
        if entry is not None and entry.words[1] != namespace.is_retired:
            _fail("V4", f"namespace {namespace.root} is in the ledger as {'not ' * namespace.is_retired}retired")
    for pin in state.pins.values():
        entry = cells.read(pin.cell) if pin.cell != NO_CELL else None
        if entry is None and not refused:
            _fail("L10", f"pin {pin.name} is not in the ledger")
    known = [namespace.cell for namespace in state.namespaces] + [pin.cell for pin in state.pins.values()]
    known += state.ledger.records.extras_cells()
    if found := {entry.cell for entry in cells.entries()}.difference(known):
        _fail("L7", f"nobody owns the cells {found}")
