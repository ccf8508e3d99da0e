"""Recomputes from the blocks and the tree what sessions hold by themselves, and what they compute. For `invariants`."""

from collections import Counter
from typing import NoReturn

from kvharbor.pool.blocks import COMMITTED, QUARANTINED, RESERVED, SHADOW
from kvharbor.pool.errors import InvariantViolation
from kvharbor.pool.marks import MAX_MARKS
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.sequence import Session
from kvharbor.pool.state import State
from kvharbor.pool.writers import extras_to_come


def check_holdings(state: State) -> None:
    """Raises InvariantViolation for the first thing in which [B1], [B2] or [B6] does not hold."""
    for owner in state.sessions.values():
        _check_kinds(state, owner)
        _check_closure(state, owner)
    _check_marks(state)


def _check_kinds(state: State, owner: Session) -> None:
    """B1: each block is what the set says it is."""
    held, column = owner.blocks, state.blocks.state
    for blocks, kinds in (
        (held.fresh, {RESERVED}),
        (held.leased, {QUARANTINED if owner.ended else RESERVED, RESERVED}),
        (held.shadows, {QUARANTINED if owner.ended else SHADOW, SHADOW}),
        (held.behind, {COMMITTED}),
    ):
        for block in blocks:
            if column[block] not in kinds:
                _fail("B1", f"session {owner.session} has block {block} in state {column[block]}")
    if not held.shadows <= state.blocks.canonical.keys():
        _fail("B1", f"session {owner.session} has shadows of nothing")


def _check_closure(state: State, owner: Session) -> None:
    """B2: who holds a block holds all before it, and each one knows how much it is held for."""
    held, parents = owner.blocks, state.tree.parent
    behind = Counter([parents[block] for block in held.behind if parents[block] < FIRST_ROOT])
    behind.update([state.blocks.canonical[block] for block in held.shadows])
    if behind != Counter(held.behind):
        _fail("B2", f"session {owner.session} holds {dict(behind)} and counts {held.behind}")
    if not behind.keys() <= held.behind.keys():
        _fail(
            "B2", f"session {owner.session} holds a block without its parent, or a shadow without its canonical block"
        )
    if any(not held.behind[block] for block in held.lingering):
        _fail("B2", f"session {owner.session} holds a block for nothing")
    seen: set[int] = set()
    for block in held.behind:
        if parents[block] < FIRST_ROOT and parents[block] not in seen:
            _fail("B2", f"session {owner.session} has block {block} in front of its parent")
        seen.add(block)


def _check_marks(state: State) -> None:
    """B6: a mark has contents to come behind a node that its session holds, and each session's are counted."""
    marks = state.marks
    found = {
        mark: (session, node)
        for session, by_node in marks.by_session.items()
        for node, own in by_node.items()
        for mark in own
    }
    if found != {mark: (mark.session, mark.chain_node) for mark in marks.by_age}:
        _fail("B6", "the marks are elsewhere than they know")
    counts: Counter[int] = Counter()
    for mark in marks.by_age:
        size = state.writers.content_bytes(mark.namespace)
        counts[mark.session] += -(-(len(mark.tail) + sum(map(len, extras_to_come(mark).values()))) // size)
        owner = state.sessions[mark.session]
        if mark.chain_node != mark.namespace.root and mark.chain_node not in owner.blocks.behind:
            _fail("B6", f"session {mark.session} marks what comes behind {mark.chain_node}, which it does not hold")
        if owner.ended or len(mark.tail) < size or mark.writer_key != state.writers.key_of(mark):
            _fail("B6", f"session {mark.session} has a mark of nothing, or one that is entered elsewhere")
    if (
        Counter([mark.session for mark in marks.by_age]) != marks.counts
        or max(marks.counts.values(), default=0) > MAX_MARKS
    ):
        _fail("B6", f"{len(found)} marks, {dict(marks.counts)} counted")
    if counts != marks.block_counts or any(count > state.blocks.total_count for count in counts.values()):
        _fail("B6", f"{dict(counts)} contents are marked, {dict(marks.block_counts)} counted")
    times = [mark.seen_at for mark in marks.by_age]
    if times != sorted(times):
        _fail("B6", "the marks are not in the order in which they were seen")


def _fail(rule: str, detail: str) -> NoReturn:
    raise InvariantViolation(rule=rule, detail=detail)
