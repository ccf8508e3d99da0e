"""Recomputes who is computing what from the sequences, and compares it with the table of writers. For `invariants`."""

from typing import NoReturn

from kvharbor.pool.blocks import RESERVED
from kvharbor.pool.errors import InvariantViolation
from kvharbor.pool.sequence import Sequence
from kvharbor.pool.state import State


def check_writers(state: State, sequences: list[Sequence]) -> None:
    """W1: an entry for each live sequence with a full reserved block of known tokens, and no other. W7: who says so."""
    writers, live = state.writers, set(sequences)
    entered: dict[Sequence, tuple[bytes, int]] = {}
    marks: set[object] = set()
    for key, sessions in writers.by_key.items():
        for session, own in sessions.items():
            for one in own:
                if isinstance(one, Sequence):
                    entered[one] = key, session
                elif (key, session) == (one.writer_key, one.session):
                    marks.add(one)
    if marks != set(state.marks.by_age):
        _fail("W1", "a mark is not among the writers, or there elsewhere than it knows")
    for key, sessions in writers.by_key.items():
        if not sessions or not all(sessions.values()):
            _fail("W1", f"nobody is left at the key {key[:16].hex()}")
    for sequence, (key, session) in entered.items():
        if sequence not in live:
            _fail("W1", f"sequence {sequence.name()} is over and counts as a writer")
        if (key, session) != (sequence.writer_key, sequence.session):
            _fail("W1", f"sequence {sequence.name()} is entered as another's, or elsewhere than it knows")
    for sequence in live:
        if (sequence.writer_key is not None) != (sequence in entered):
            _fail("W1", f"sequence {sequence.name()} does not know where it is entered")
        if sequence in state.in_flight and sequence not in entered:
            continue  # not admitted yet, or being taken down
        if sequence.writer_key != _key(state, sequence):
            _fail("W1", f"sequence {sequence.name()} computes another block than it is entered for")
    if any(state.sessions[session].ended for session in writers.signs):
        _fail("W7", "a session that has ended is taken to be at work")
    for key, waiting in state.awaiting.by_key.items():
        if not waiting or any(awaited.moved or awaited.key != key for awaited in waiting):
            _fail("W3", f"somebody waits for another block than {key[:16].hex()}")
        if key not in writers.by_key:
            _fail("W3", f"{len(waiting)} requests wait for a block that nobody computes")


def _key(state: State, sequence: Sequence) -> bytes | None:
    """Returns what a sequence is computing next; nothing, if its blocks wait for the end of its process."""
    committed, table = sequence.committed_blocks, sequence.table
    # While it is admitted its table is still filled.
    if committed < len(table) and state.blocks.state[table[committed]] != RESERVED:
        return None
    return state.writers.key_of(sequence)


def _fail(rule: str, detail: str) -> NoReturn:
    raise InvariantViolation(rule=rule, detail=detail)
