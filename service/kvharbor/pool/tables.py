"""How much a session may have in the tables of its sequences, whoever shares the blocks. Rule [P8], in O(1)."""

from typing import Final

from kvharbor.pool.errors import TablesFull
from kvharbor.pool.sequence import SEQUENCE_ENTRIES, Session
from kvharbor.pool.state import State

MAX_SHARED_ENTRIES: Final = 1 << 23
"""Entries that a session may have beyond one for each block of the pool: 64 MiB of them."""


def limit(state: State) -> int:
    """Returns how many entries a session may have."""
    return state.blocks.total_count + MAX_SHARED_ENTRIES


def refuse_if_full(state: State, owner: Session, block_count: int, sequence_count: int = 1) -> None:
    """Refuses new sequences that have so many blocks in all; for a table that grows, `sequence_count` is 0."""
    _refuse_above(limit(state), owner, block_count + SEQUENCE_ENTRIES * sequence_count)


def refuse_if_resumed_too_much(state: State, owner: Session, block_count: int) -> None:
    """Refuses to take up a sequence of so many blocks, where no session can have had as much."""
    _refuse_above(2 * limit(state), owner, block_count + SEQUENCE_ENTRIES)


def _refuse_above(budget: int, owner: Session, needed: int) -> None:
    held = owner.entry_count + owner.given_entry_count
    if held + needed > budget:
        raise TablesFull(needed_entry_count=needed, held_entry_count=held, budget_entry_count=budget)
