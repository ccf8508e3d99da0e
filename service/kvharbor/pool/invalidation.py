"""Invalidate: a block whose bytes are not what it was committed for leaves the index, with all behind it [B4]."""

from collections import Counter
from itertools import islice
from typing import Final

from kvharbor.pool.block_release import give_back
from kvharbor.pool.errors import BlockHeld, BlockNotHeld, InvalidField
from kvharbor.pool.results import Invalidated
from kvharbor.pool.sequence import Session
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps

MAX_SUBTREE: Final = 8192
"""Blocks that may leave the index in one step."""


def invalidate(state: State, session: int, block_id: int, generation: int) -> Steps[Invalidated]:
    """Makes what a session holds of a block and those behind it leased again, and frees the rest.

    Shadows of theirs are among what it holds. Refused if anybody else holds any. All in one step, as between two
    somebody could hold it: so there may be no more than MAX_SUBTREE.
    """
    owner = state.session(session)
    held, blocks = owner.blocks, state.blocks
    if block_id not in held.behind or blocks.generation[block_id] != generation:
        raise BlockNotHeld(
            block_id=block_id, generation=generation, remedy="name a committed block that the session holds"
        )
    subtree = [block_id, *islice(state.tree.descend(block_id), MAX_SUBTREE)]
    if len(subtree) > MAX_SUBTREE:
        raise InvalidField(
            field="blocks",
            value=f"block {block_id}, with {MAX_SUBTREE} or more behind it",
            limit=f"{MAX_SUBTREE} blocks with what is behind them",
            remedy="invalidate what is behind it before it, from the end of the chain, or bump the namespace",
        )
    shadows = list[int]()
    looked_at = len(subtree)
    if held.shadows and any(blocks.refs[block] > (block in held.behind) for block in subtree):
        below = set(subtree)
        shadows = [block for block in held.shadows if blocks.canonical[block] in below]
        looked_at += len(held.shadows)
    _refuse_if_held(state, owner, subtree, shadows)

    own = [block for block in subtree if block in held.behind]
    unheld = [block for block in subtree if block not in held.behind]
    leased = [*own, *shadows]
    before = state.run(leased)
    state.marks.end_behind(session, own)
    held.shadows.difference_update(shadows)
    following = held.cut(own, state.tree.parent[block_id])
    held.leased.update(leased)

    own.reverse()
    unheld.reverse()
    blocks.withdraw_shadows(shadows, session)
    blocks.evictable.remove_many(unheld)
    blocks.release_private(unheld)
    blocks.withdraw(own, session)
    # Nobody holds what is behind the unheld ones, so all in all children go before parents. It is no eviction, as [V5].
    state.unindex([*unheld, *own], session, owner.tenant, is_eviction=False)
    while following is not None:
        # What has lingered for the block goes too.
        gone, following = held.let_go(following, state.tree.parent, state.slice_blocks)
        give_back(state, owner, [], gone)
        yield
    after = state.run(leased)
    if looked_at >= state.slice_blocks:
        yield  # one of many, perhaps
    return Invalidated(after, before)


def _refuse_if_held(state: State, owner: Session, subtree: list[int], shadows: list[int]) -> None:
    """Refuses unless all that holds any of these blocks is the session itself."""
    blocks, behind = state.blocks, owner.blocks.behind
    by_shadows = Counter([blocks.canonical[block] for block in shadows])
    held_count = sum(
        1 for block in subtree if blocks.pins[block] or blocks.refs[block] != (block in behind) + by_shadows[block]
    )
    if held_count:
        raise BlockHeld(block_id=subtree[0], held_block_count=held_count)
