"""Sessions begin, end, and are proved quiet.

A lost session's private blocks wait in quarantine, since a process of it may still write them, and its read
holds stay, since one may still read ([G3]). Only `session_quiet` gives them back.
"""

from kvharbor.pool.blocks import SHADOW
from kvharbor.pool.release import release_each
from kvharbor.pool.sequence import Session
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps


def open_session(state: State, session: int, tenant: str) -> None:
    """Lets a session hold blocks. Its number is never used again."""
    state.sessions[session] = Session(session, tenant)


def end_session(state: State, session: int) -> Steps[None]:
    """RESERVED and SHADOW -> QUARANTINED; its calls are refused from now on."""
    owner = state.sessions[session]
    owner.ended = True
    blocks = state.blocks
    for sequence in list(owner.sequences.values()):
        table, committed = sequence.table, sequence.committed_blocks
        doomed = table[committed:]
        if blocks.canonical:
            doomed += [block for block in table[:committed] if blocks.state[block] == SHADOW]
        for start in range(0, len(doomed), state.slice_blocks):
            blocks.quarantine(doomed[start : start + state.slice_blocks])
            state.revision += 1
            yield


def session_quiet(state: State, session: int) -> Steps[int]:
    """No process of the session touches a block any more: all it held goes back. Returns how many sequences."""
    owner = state.sessions[session]
    owner.ended = owner.quiet = True
    # A copy of the service's own may still run into its blocks; the end of the fork gives those back.
    idle = [sequence for sequence in owner.sequences.values() if not sequence.copy_count]
    yield from release_each(state, owner, idle)
    state.forget_if_over(owner)
    return len(idle)
