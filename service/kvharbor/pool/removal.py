"""Eviction by an administrator's hand: one block with all below it, or everything that nobody holds."""

from kvharbor.pool.blocks import COMMITTED
from kvharbor.pool.errors import BlockHeld, BlockNotFound
from kvharbor.pool.evicted import ADMINISTRATOR
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps


def evict_block(state: State, block_id: int, generation: int, tenant: str | None) -> Steps[int]:
    """Removes a block and its descendants; refused while any of them is held."""
    blocks, tree = state.blocks, state.tree
    if (
        not 0 <= block_id < len(blocks.state)
        or blocks.state[block_id] != COMMITTED
        or blocks.generation[block_id] != generation
        or (tenant is not None and tree.namespace_of(block_id).tenant != tenant)
    ):
        raise BlockNotFound(block_id=block_id, generation=generation)
    subtree = [block_id, *tree.descend(block_id)]
    held_count = len(subtree) - state.unheld_count(subtree)
    if held_count:
        raise BlockHeld(block_id=block_id, held_block_count=held_count)
    return (yield from evict_all(state, subtree, ADMINISTRATOR, ""))


def evict_all(state: State, subtree: list[int], session: int, tenant: str) -> Steps[int]:
    """Gives up cached blocks, listed parents before children, and all that hangs below them, for a session."""
    blocks, tree = state.blocks, state.tree
    doomed = [(block, blocks.generation[block]) for block in subtree]
    evicted = 0
    while doomed:
        part = doomed[-state.slice_blocks :]
        del doomed[-state.slice_blocks :]
        # Between slices one may have been evicted, or held again with all above it, or have got a child: such
        # blocks stay.
        victims: dict[int, None] = {}
        for block, age in reversed(part):
            if (
                blocks.generation[block] == age
                and block in blocks.evictable
                and all(child in victims for child in tree.children(block))
            ):
                victims[block] = None
        blocks.evictable.remove_many(victims)
        state.forget(list(victims), session, tenant)
        evicted += len(victims)
        if doomed:
            yield
    return evicted


def evict_unheld(state: State) -> Steps[int]:
    """Removes every cached block."""
    evicted = 0
    while part := min(state.slice_blocks, state.blocks.cached_count):
        evicted += state.evict(part)
        if state.blocks.cached_count:
            yield
    return evicted
