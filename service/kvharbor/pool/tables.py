"""How much a session may have in the tables of its sequences, whoever shares the blocks. Rule [P8], in O(1)."""

from kvharbor.pool.errors import TablesFull
from kvharbor.pool.sequence import SEQUENCE_ENTRIES, Session
from kvharbor.pool.state import State


def refuse_if_full(state: State, owner: Session, block_count: int, sequence_count: int = 1) -> None:
    """Refuses new sequences that have so many blocks in all; for a table that grows, `sequence_count` is 0."""
    _refuse_above(state.most_entries, owner, block_count + SEQUENCE_ENTRIES * sequence_count)


def refuse_if_never_had(state: State, owner: Session, block_count: int) -> None:
    """Refuses to take up a sequence of so many blocks, where no session can name as much as its own."""
    _refuse_above(2 * state.most_entries, owner, block_count + SEQUENCE_ENTRIES)


def _refuse_above(budget: int, owner: Session, needed: int) -> None:
    held = owner.entry_count + owner.given_entry_count
    if held + needed > budget:
        raise TablesFull(needed_entry_count=needed, held_entry_count=held, budget_entry_count=budget)
