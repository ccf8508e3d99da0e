"""Every rule of docs/invariants.md that concerns the pool, checked by walking all of it.

It recomputes from the holders (sequences, hand-offs, pins, a recovery) what the columns and counters should say.
"""

from collections import Counter
from itertools import islice
from typing import NoReturn

from kvharbor.pool.blocks import COMMITTED, FREE, QUARANTINED, RESERVED, SCRATCH, SHADOW
from kvharbor.pool.digest import OPAQUE_KEY_BYTES, block_digest
from kvharbor.pool.engines_check import check_engines
from kvharbor.pool.errors import InvariantViolation
from kvharbor.pool.holdings_check import check_holdings
from kvharbor.pool.ledger_check import check_ledger
from kvharbor.pool.sequence import Sequence, Session
from kvharbor.pool.state import State
from kvharbor.pool.writers_check import check_writers


def check_invariants(state: State) -> None:
    """Raises InvariantViolation, with the rule, for the first thing found wrong."""
    sequences = _sequences(state)
    _check_conservation(state)
    _check_free(state)
    _check_holders(state, sequences)
    _check_tables(state, sequences)
    _check_tree(state)
    _check_evictable(state)
    _check_promises(state, sequences)
    _check_registers(state, sequences)
    check_ledger(state, sequences)
    check_writers(state, sequences)
    check_holdings(state)
    check_engines(state)


def _fail(rule: str, detail: str) -> NoReturn:
    raise InvariantViolation(rule=rule, detail=detail)


def _sequences(state: State) -> list[Sequence]:
    found = [sequence for session in state.sessions.values() for sequence in session.sequences.values()]
    found += [given.sequence for given in state.handoffs.values()]
    found += state.in_flight
    if len({id(sequence) for sequence in found}) != len(found):
        _fail("P4", "a sequence is in two places")
    return found


def _check_conservation(state: State) -> None:
    """G5: free + reserved + active + warm + cached + quarantined = total, each as the columns say."""
    blocks = state.blocks
    counted = Counter(_class_of(state, block) for block in range(blocks.first_block, len(blocks.state)))
    kept = {
        "free": blocks.free.count,
        "reserved": blocks.reserved_count,
        "active": blocks.active_count,
        "warm": blocks.warm_count,
        "cached": blocks.cached_count,
        "quarantined": blocks.quarantined_count,
    }
    if {name: count for name, count in kept.items() if count} != counted:
        _fail("G5", f"counters say {kept}, columns {dict(counted)}")
    if sum(kept.values()) != blocks.total_count:
        _fail("G5", f"{kept} do not sum to {blocks.total_count}")
    shared = sum(1 for count in blocks.refs if count >= 2)
    if shared != blocks.shared_count:
        _fail("G5", f"{blocks.shared_count} shared blocks counted, columns say {shared}")
    pinned = sum(1 for count in blocks.pins if count)
    if pinned != blocks.pinned_count:
        _fail("G5", f"{blocks.pinned_count} pinned blocks counted, columns say {pinned}")
    if not 0 <= state.claimed <= blocks.free.count + blocks.cached_count:
        _fail("G5", f"{state.claimed} blocks claimed of {blocks.free.count} + {blocks.cached_count}")


def _class_of(state: State, block: int) -> str:
    blocks = state.blocks
    kind = blocks.state[block]
    if kind == FREE:
        return "free"
    if kind == RESERVED:
        return "reserved"
    if kind == QUARANTINED:
        return "quarantined"
    if kind == SHADOW or blocks.refs[block]:
        return "active"
    return "warm" if blocks.pins[block] else "cached"


def _check_free(state: State) -> None:
    """P4: a block has one place in the free list. P6: scratch blocks are never handed out."""
    blocks = state.blocks
    listed = list(blocks.free)
    marked = [block for block, kind in enumerate(blocks.state) if kind == FREE]
    if listed != marked or len(listed) != blocks.free.count:
        _fail("P4", f"{len(listed)} blocks in free runs, {len(marked)} marked free, {blocks.free.count} counted")
    if any(kind != SCRATCH for kind in blocks.state[: blocks.first_block]):
        _fail("P6", "a scratch block is in use")


def _check_holders(state: State, sequences: list[Sequence]) -> None:
    """G2, P1, P2: each private block is in one table; refs and pins are the numbers of holders."""
    blocks = state.blocks
    refs: Counter[int] = Counter(blocks.canonical.values())
    private: Counter[int] = Counter()
    for sequence in sequences:
        for block in sequence.table:
            if blocks.state[block] == COMMITTED:
                refs[block] += 1
            else:
                private[block] += 1
    for session in state.sessions.values():
        private.update(session.unclaimed)
        private.update(session.blocks.private())
        refs.update(session.blocks.behind.keys())
    if state.recovery is not None:
        refs.update(state.recovery.held)
        private.update(state.recovery.limbo)
    pins = Counter(block for pin in [*state.pins.values(), *state.ending_pins] for block in pin.blocks)
    for block, kind in enumerate(blocks.state):
        if private[block] != (kind in (RESERVED, SHADOW, QUARANTINED)):
            _fail("G2", f"block {block} in state {kind} is in {private[block]} tables")
        if blocks.refs[block] != refs[block]:
            _fail("P2", f"block {block} has {refs[block]} holders, refs say {blocks.refs[block]}")
        if blocks.pins[block] != pins[block]:
            _fail("P2", f"block {block} has {pins[block]} pins, the column says {blocks.pins[block]}")
    for shadow, canonical in blocks.canonical.items():
        if blocks.state[shadow] not in (SHADOW, QUARANTINED) or blocks.state[canonical] != COMMITTED:
            _fail("P7", f"block {shadow} shadows {canonical}")


def _check_tables(state: State, sequences: list[Sequence]) -> None:
    """Cursors are in order; the committed part of a table is one chain from its namespace's root."""
    blocks, tree, block_tokens = state.blocks, state.tree, state.block_tokens
    for sequence in sequences:
        node = sequence.namespace.root
        for position, block in enumerate(sequence.table[: sequence.committed_blocks]):
            canonical = blocks.canonical.get(block, block)
            if tree.parent[canonical] != node:
                _fail("P7", f"sequence {sequence.name()} leaves its chain at position {position}")
            node = canonical
        if sequence in state.in_flight:
            continue  # half built or half taken down: its cursors are set when it is whole
        capacity = len(sequence.table) * block_tokens
        cursors = (sequence.cached_tokens, sequence.computed_tokens, sequence.token_count, capacity)
        committed_tokens = sequence.committed_blocks * block_tokens
        if list(cursors) != sorted(cursors) or committed_tokens > sequence.computed_tokens:
            _fail("cursors", f"sequence {sequence.name()}: {committed_tokens} committed, {cursors}")
        if sequence.chain_node != node:
            _fail("P7", f"sequence {sequence.name()} would commit below {sequence.chain_node}, not {node}")
        if len(sequence.tail) != 4 * (sequence.token_count - committed_tokens):
            _fail("cursors", f"sequence {sequence.name()} has a tail of {len(sequence.tail)} bytes")


def _check_tree(state: State) -> None:
    """G1: every committed block hangs below its namespace by exactly its content, under the right digest."""
    blocks, tree, token_bytes = state.blocks, state.tree, 4 * state.block_tokens
    reached = sibling_count = 0
    for namespace in state.namespaces:
        below = list(tree.descend(namespace.root))
        reached += len(below)
        if len(below) != namespace.block_count or not (below or namespace.user_count):
            _fail("G5", f"namespace {namespace.root} counts {namespace.block_count} blocks, has {len(below)}")
        for block in below:
            parent, content = tree.parent[block], tree.content_of(block)
            if blocks.state[block] != COMMITTED:
                _fail("P1", f"indexed block {block} is not committed")
            digest = content if namespace.is_opaque else block_digest(tree.digest_of(parent), content)
            if tree.digest_of(block) != digest or (namespace.is_opaque and len(content) != OPAQUE_KEY_BYTES):
                _fail("G1", f"block {block} has another digest than its content")
            size = OPAQUE_KEY_BYTES if namespace.is_opaque else token_bytes
            found = tree.match(parent, content[:size], {0: content[size:]}, 0, 1)
            if found != [block] or tree.find(parent, content) != block:
                _fail("G1", f"block {block} is not found by its content")
            has_sibling = len(list(islice(tree.children(parent), 2))) > 1
            if tree.siblings.get(tree.keys((block,))[0]) != (block if has_sibling else None):
                _fail("G1", f"block {block} with{'out' * (not has_sibling)} siblings is in the wrong place")
            sibling_count += has_sibling
    committed = blocks.state.count(COMMITTED)
    if sibling_count != len(tree.siblings):
        _fail("G1", f"{len(tree.siblings)} blocks are indexed, {sibling_count} have siblings")
    if not reached == committed == tree.block_count:
        _fail("P1", f"{reached} of {committed} committed blocks can be reached")


def _check_evictable(state: State) -> None:
    """P2: exactly the unheld committed blocks are evictable; none has a held child."""
    blocks, tree = state.blocks, state.tree
    evictable = set(blocks.evictable)
    if len(evictable) != len(blocks.evictable):
        _fail("P2", f"the eviction policy counts {len(blocks.evictable)} blocks of {len(evictable)}")
    for block, kind in enumerate(blocks.state):
        unheld = kind == COMMITTED and not blocks.refs[block] and not blocks.pins[block]
        if (block in evictable) != unheld or (block in blocks.evictable) != unheld:
            _fail("P2", f"block {block} is {'not ' * unheld}in the eviction policy")
        if kind == COMMITTED and not unheld and tree.parent[block] in evictable:
            _fail("P2", f"block {tree.parent[block]} could be evicted before its child {block}")
    for block in evictable:
        namespace = tree.namespace_of(block)
        if namespace.is_retired and not namespace.sweep_count:
            _fail("V1", f"block {block} is cached in the retired namespace {namespace.root}")


def _check_promises(state: State, sequences: list[Sequence]) -> None:
    """Warm blocks still to come count once, and only while a sequence is there to commit them."""
    promised = sum(pin.promised for pin in state.pins.values())
    if promised != state.promised:
        _fail("warm", f"{state.promised} blocks promised, pins say {promised}")
    for sequence in sequences:
        pin = sequence.pin
        if pin is None:
            continue
        if pin.sequence is not sequence or pin.promised + len(pin.blocks) != pin.block_count:
            _fail("warm", f"pin {pin.name}: {pin.promised} + {len(pin.blocks)} of {pin.block_count} blocks")


def _check_entries(state: State, session: Session) -> None:
    """Those that an operation has still to fill count as soon as it is admitted."""
    there = sum(sequence.entry_count for sequence in session.sequences.values())
    given = sum(one.sequence.entry_count for one in state.handoffs.values() if one.source[0] == session.session)
    if not 0 <= session.entry_count - there <= state.claimed or session.given_entry_count != given:
        _fail("P8", f"session {session.session} counts {session.entry_count} entries of {there}, given: {given}")
    if session.entry_count + given > 2 * state.most_entries:
        _fail("P8", f"session {session.session} has {session.entry_count} entries and {given} given ones")


def _check_registers(state: State, sequences: list[Sequence]) -> None:
    """What names a sequence finds it; tenants and namespaces count what is theirs."""
    for session in state.sessions.values():
        live = session.sequences.values()
        requests = {sequence.request_id: sequence for sequence in live if sequence.request_id}
        if session.by_request != requests or len(requests) != sum(1 for one in live if one.request_id):
            _fail("G4", f"session {session.session} knows other request_ids than its sequences have")
        grouped = {(sequence.group, sequence.number) for sequence in live if sequence.group}
        if grouped != {(group, number) for group, members in session.by_group.items() for number in members}:
            _fail("P4", f"session {session.session} knows other groups than its sequences have")
        _check_entries(state, session)
    users = Counter(sequence.namespace.root for sequence in sequences)
    users.update(pin.namespace.root for pin in [*state.pins.values(), *state.ending_pins])
    users.update(mark.namespace.root for mark in state.marks.by_age)
    committed: Counter[str] = Counter()
    for namespace in state.namespaces:
        committed[namespace.tenant] += namespace.block_count
        if namespace.user_count != users[namespace.root]:
            _fail("G5", f"namespace {namespace.root} counts {namespace.user_count} users of {users[namespace.root]}")
    retired = [namespace for namespace in state.namespaces if namespace.is_retired]
    if len(retired) != state.namespaces.retired_count:
        _fail("V1", f"{state.namespaces.retired_count} retired namespaces counted of {len(retired)}")
    for pin in state.pins.values():
        if pin.namespace.is_retired and not pin.namespace.sweep_count:
            _fail("V3", f"pin {pin.name} outlives its version")
    for name, tenant in state.tenants.items():
        if tenant.committed_block_count != committed[name]:
            _fail("G5", f"tenant {name} counts {tenant.committed_block_count} blocks of {committed[name]}")
