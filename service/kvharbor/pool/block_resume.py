"""Resume of what a session held by itself. The ledger says what each block is. Rules [B7] and [L11].

A committed one is held again with all before it. Until every session has resumed the recovery holds what was held, so
that takes no room; what was not held is taken if there is room, as by an Acquire.
"""

from array import array

from kvharbor.pool import validate
from kvharbor.pool.block_runs import BlockRun
from kvharbor.pool.blocks import COMMITTED, RESERVED
from kvharbor.pool.ledger import STATE_MASK
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.sequence import Session
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps


def resume_blocks(state: State, session: int, blocks: BlockRun) -> Steps[BlockRun]:
    """Takes up what an unresumed session names; returns what is not its own. Repeating it changes nothing."""
    validate.run("blocks", blocks)
    owner = state.session(session)
    generation, first_block = state.blocks.generation, state.blocks.first_block
    is_unresumed = state.recovery is not None and session in state.recovery.awaited
    lost = BlockRun(array("I"), array("Q"))
    for index, (block, age) in enumerate(zip(blocks.block_ids, blocks.generations, strict=True), start=1):
        is_there = first_block <= block < len(generation) and generation[block] == age
        if not is_there or not (_is_held(owner, block) or (is_unresumed and _take_up(state, owner, block))):
            lost.block_ids.append(block)
            lost.generations.append(age)
        if not index % state.slice_blocks and index < len(blocks):
            yield
    return lost


def _is_held(owner: Session, block: int) -> bool:
    held = owner.blocks
    return block in held.leased or block in held.shadows or (block in held.behind and block not in held.lingering)


def _take_up(state: State, owner: Session, block: int) -> bool:
    """Takes up one block as what the ledger says it is; whether it is the session's."""
    blocks, held = state.blocks, owner.blocks
    if blocks.state[block] == COMMITTED:
        return _hold(state, owner, block)
    if block not in owner.unclaimed:
        return False
    if state.ledger.words[block] & STATE_MASK == RESERVED:
        blocks.take_back_reserved((block,))
        held.leased.add(block)
    else:
        canonical = _canonical(state, block)
        if canonical is None:
            return False
        was_named = canonical in held.behind and canonical not in held.lingering
        if not _hold(state, owner, canonical):
            return False
        if not was_named:
            held.lingering.add(canonical)
        held.add_shadow(block, canonical, state.tree.parent[canonical])
        blocks.hold((canonical,))
        blocks.take_back_shadow(block, canonical)
    owner.unclaimed.remove(block)
    state.revision += 1
    return True


def _hold(state: State, owner: Session, block: int) -> bool:
    """Holds a committed block of the session's tenant, and all before it; whether there was room for it."""
    held, parents = owner.blocks, state.tree.parent
    if state.tree.namespace_of(block).tenant != owner.tenant:
        return False
    chain: list[int] = []
    node = block
    while node < FIRST_ROOT and node not in held.behind:
        chain.append(node)
        node = parents[node]
    if state.unheld_count(chain) > state.available:
        return False
    chain.reverse()
    state.blocks.hold(chain)
    held.add(chain, node)
    held.lingering.update(chain)
    held.lingering.discard(block)
    state.revision += 1
    return True


def _canonical(state: State, block: int) -> int | None:
    """Returns the committed block that a shadow's record names."""
    records, generation = state.ledger.records, state.blocks.generation
    node = records.parents[block]
    if node >= FIRST_ROOT:
        namespace = state.namespaces.at(node)
    else:
        is_there = state.tree.contains(node) and generation[node] == records.parent_ages[block]
        namespace = state.tree.namespace_of(node) if is_there else None
    if namespace is None:
        return None
    content = records.recorded(block, generation, is_opaque=namespace.is_opaque)
    canonical = None if content is None else state.tree.find(node, content)
    if content is None or canonical is None:
        return None
    # The digest of an exact record covers the namespace too.
    digests = [state.tree.digest_of(canonical)]
    is_vouched = records.vouched_count([block], node, [content], digests, is_opaque=namespace.is_opaque)
    return canonical if is_vouched else None
