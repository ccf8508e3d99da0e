"""Sessions begin, end, and are proved quiet.

A lost session's private blocks wait in quarantine, since a process of it may still write them, and its read
holds stay, since one may still read ([G3]). `writers_quiet` gives back the former, `session_quiet` everything.
After a restart the same goes for what a session had before and has not resumed yet.
"""

from collections.abc import Callable
from typing import Final

from kvharbor.pool.block_release import drop_private_blocks, let_go_committed
from kvharbor.pool.engines import Engine
from kvharbor.pool.errors import InvalidField
from kvharbor.pool.ledger import MAX_SESSION
from kvharbor.pool.release import drop_private, end_pin, release_each
from kvharbor.pool.results import Holding
from kvharbor.pool.sequence import Sequence, Session
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps

ENTRIES_A_SLICE: Final = 1 << 17
"""Entries of tables that are looked at in one slice, where there is nothing to give back: some milliseconds."""


def open_session(state: State, session: int, tenant: str, engine: Engine) -> None:
    """Lets a session hold blocks. Its number is never used again."""
    if not 1 <= session <= MAX_SESSION:
        raise InvalidField(
            field="session",
            value=session,
            limit=f"1 to {MAX_SESSION}",
            remedy="a pool counts no more sessions than that: make it anew",
        )
    state.sessions[session] = Session(session, tenant, next_number=state.first_number)
    name_engine(state, session, engine)


def name_engine(state: State, session: int, engine: Engine) -> None:
    """Tells what computes in a session that begins, or goes on after a restart; before its first call."""
    live = {owner.engine for owner in state.sessions.values()}
    state.sessions[session].engine = state.engines.begin(engine, live)


def end_session(state: State, session: int) -> Steps[None]:
    """RESERVED and SHADOW -> QUARANTINED; its calls are refused from now on."""
    owner = state.sessions[session]
    owner.ended = True
    state.marks.end_session(session)
    state.writers.signs.pop(session, None)

    def quarantine(sequence: Sequence) -> Steps[None]:
        state.writers.remove(sequence)
        yield from _quarantine(state, state.private_blocks(sequence))

    yield from _each(list(owner.sequences.values()), quarantine)
    yield from _quarantine(state, list(owner.blocks.private()))


def _each(sequences: list[Sequence], work: Callable[[Sequence], Steps[None]]) -> Steps[None]:
    looked_at = 0
    for sequence in sequences:
        looked_at += sequence.entry_count
        yield from work(sequence)
        if looked_at >= ENTRIES_A_SLICE:
            looked_at = 0
            yield


def _quarantine(state: State, doomed: list[int]) -> Steps[None]:
    for start in range(0, len(doomed), state.slice_blocks):
        state.blocks.quarantine(doomed[start : start + state.slice_blocks])
        state.revision += 1
        yield


def writers_quiet(state: State, session: int) -> Steps[None]:
    """No process of an ended session writes a block any more: QUARANTINED -> FREE. Its read holds stay."""
    owner = state.sessions[session]
    owner.writers_quiet = True
    yield from give_back_unclaimed(state, owner)
    # A copy of the service's own may still run into the blocks of others; the end of the fork gives those back.
    idle = [sequence for sequence in owner.sequences.values() if not sequence.copy_count]
    yield from _each(idle, lambda sequence: drop_private(state, sequence))
    yield from drop_private_blocks(state, owner)


def session_quiet(state: State, session: int) -> Steps[int]:
    """No process of the session touches a block any more: all it held goes back. Returns how many sequences."""
    owner = state.sessions[session]
    owner.ended = owner.writers_quiet = owner.quiet = True
    state.marks.end_session(session)
    state.writers.signs.pop(session, None)
    yield from give_back_unclaimed(state, owner)
    # As in `writers_quiet`.
    idle = [sequence for sequence in owner.sequences.values() if not sequence.copy_count]
    yield from release_each(state, owner, idle)
    yield from drop_private_blocks(state, owner)
    yield from let_go_committed(state, owner)
    state.forget_if_over(owner)
    yield from settle(state, session)
    return len(idle)


def holding(state: State, session: int) -> Holding:
    """Tells what a session has; nothing if it is not there."""
    owner = state.sessions.get(session)
    if owner is None:
        return Holding(0, 0)
    private = sum(len(state.private_blocks(sequence)) for sequence in owner.sequences.values())
    private += len(owner.unclaimed) + owner.blocks.private_count()
    return Holding(len(owner.sequences), private, len(owner.blocks.behind), len(owner.blocks.leased))


def held_by_engine(state: State) -> dict[int, tuple[int, int]]:
    """Returns how many sessions each engine has, by its number, and how many blocks these hold. O(sessions)."""
    held: dict[int, tuple[int, int]] = {}
    for owner in state.sessions.values():
        by_itself = len(owner.blocks.behind) + owner.blocks.private_count()
        session_count, block_count = held.get(owner.engine, (0, 0))
        held[owner.engine] = session_count + 1, block_count + owner.table_block_count + by_itself
    return held


def reserved_block_count(state: State, session: int) -> int:
    """Returns how many RESERVED blocks a session has; none if it is not there."""
    owner = state.sessions.get(session)
    if owner is None:
        return 0
    in_tables = sum(len(sequence.table) - sequence.committed_blocks for sequence in owner.sequences.values())
    return in_tables + len(owner.blocks.leased) + len(owner.blocks.fresh)


def give_back_unclaimed(state: State, owner: Session) -> Steps[int]:
    """Frees what a session of the earlier process had and has not resumed; returns how many blocks."""
    unclaimed = sorted(owner.unclaimed)
    for start in range(0, len(unclaimed), state.slice_blocks):
        part = unclaimed[start : start + state.slice_blocks]
        owner.unclaimed.difference_update(part)
        state.blocks.free_quarantined(part)
        state.revision += 1
        yield
    return len(unclaimed)


def settle(state: State, session: int) -> Steps[None]:
    """A session has resumed or is gone; after the last one the recovery holds nothing any more."""
    recovery = state.recovery
    if recovery is None:
        return
    recovery.awaited.discard(session)
    if recovery.awaited:
        return
    while recovery.limbo or recovery.held:
        state.blocks.free_quarantined(_last(recovery.limbo, state.slice_blocks))
        held = _last(recovery.held, state.slice_blocks)
        held.reverse()
        state.unhold(held)
        state.revision += 1
        yield
    state.recovery = None
    for pin in [pin for pin in state.pins.values() if not pin.blocks and pin.sequence is None]:
        end_pin(state, pin)


def _last(blocks: list[int], most: int) -> list[int]:
    """Takes blocks from the end of a list."""
    part = blocks[-most:]
    del blocks[-most:]
    return part
