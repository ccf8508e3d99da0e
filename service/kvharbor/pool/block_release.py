"""ReleaseBlocks, and how what a session holds by itself ends with it.

A committed block goes when nothing behind it is held any more, the deepest first, so that no cached block ever has a
held descendant [B2].
"""

from kvharbor.pool import validate
from kvharbor.pool.block_runs import BlockRun
from kvharbor.pool.blocks import QUARANTINED
from kvharbor.pool.sequence import Session
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps


def release_blocks(state: State, session: int, blocks: BlockRun) -> Steps[int]:
    """Ends holds of any kind in the order named; what the session does not hold is skipped [B1]."""
    validate.run("blocks", blocks)
    owner = state.session(session)
    held, generation, parents = owner.blocks, state.blocks.generation, state.tree.parent
    leased, shadows, behind, lingering = held.leased, held.shadows, held.behind, held.lingering
    released = 0
    freed: list[int] = []
    gone: list[int] = []
    for index, (block, age) in enumerate(zip(blocks.block_ids.tolist(), blocks.generations, strict=True)):
        following = None
        if index and not index % state.slice_blocks:
            give_back(state, owner, freed, gone)
            yield
        if block in leased and generation[block] == age:
            leased.remove(block)
            freed.append(block)
        elif block in behind and block not in lingering and generation[block] == age:
            left, following = held.let_go(block, parents, state.slice_blocks)
            gone += left
        elif block in shadows and generation[block] == age:
            canonical = state.blocks.unshadow(block)
            following = held.let_go_shadow(block, canonical)
            gone.append(canonical)
        else:
            continue
        released += 1
        while following is not None:
            if len(gone) >= state.slice_blocks:
                give_back(state, owner, freed, gone)
                yield
            left, following = held.let_go(following, parents, state.slice_blocks)
            gone += left
    give_back(state, owner, freed, gone)
    return released


def give_back(state: State, owner: Session, freed: list[int], gone: list[int]) -> None:
    """Changes the blocks that have left a session's set, and empties the lists."""
    if freed:
        state.blocks.free_reserved(freed)
    if gone:
        behind = owner.blocks.behind
        state.marks.end_behind(owner.session, [block for block in gone if block not in behind])
        state.unhold(gone)
    if freed or gone:
        state.revision += 1
    freed.clear()
    gone.clear()


def drop_private_blocks(state: State, owner: Session) -> Steps[None]:
    """Frees what a session has by itself and not committed; the canonical blocks of its shadows stay held."""
    held, blocks = owner.blocks, state.blocks
    while held.leased or held.shadows:
        leased = [held.leased.pop() for _ in range(min(state.slice_blocks, len(held.leased)))]
        shadows = [held.shadows.pop() for _ in range(min(state.slice_blocks - len(leased), len(held.shadows)))]
        if blocks.state[(leased or shadows)[0]] == QUARANTINED:
            canonical = blocks.free_quarantined([*leased, *shadows])
        else:
            blocks.free_reserved(leased)
            canonical = [blocks.unshadow(block) for block in shadows]
        held.lingering.difference_update(canonical)
        for block in canonical:
            held.behind[block] -= 1
        blocks.unhold(canonical)
        state.revision += 1
        yield


def let_go_committed(state: State, owner: Session) -> Steps[None]:
    """Ends all holds of committed blocks that a session has by itself."""
    held, parents = owner.blocks, state.tree.parent
    held.lingering.clear()
    while held.behind:
        # Parents stand before their children.
        gone = [held.behind.popitem()[0] for _ in range(min(state.slice_blocks, len(held.behind)))]
        for block in gone:
            if parents[block] in held.behind:
                held.behind[parents[block]] -= 1
        state.unhold(gone)
        state.revision += 1
        yield
