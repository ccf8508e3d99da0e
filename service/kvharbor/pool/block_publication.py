"""CommitBlocks: leased blocks of a session become what others may read.

They are published exactly as a sequence's are [P1], by a sequence that carries them for the time of a slice. The
session's set takes over what became of them. Rule [B3].
"""

from kvharbor.pool import validate
from kvharbor.pool.block_runs import BlockRun, Chain
from kvharbor.pool.errors import BlockNotHeld, InvalidField
from kvharbor.pool.namespaces import Namespace
from kvharbor.pool.publication import publish_until
from kvharbor.pool.removal import evict_all
from kvharbor.pool.results import Shadow
from kvharbor.pool.sequence import Sequence, Session
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps
from kvharbor.pool.tree import extras_by_block


def commit_blocks(
    state: State, session: int, parent: BlockRun, blocks: BlockRun, chain: Chain
) -> Steps[tuple[Shadow, ...]]:
    """Publishes blocks, each behind the one before. Checks everything before it changes anything.

    Leading ones that the session has committed as this content already are skipped; the result has their shadows too.
    """
    _check(state, parent, blocks, chain)
    owner = state.session(session)
    extras = extras_by_block(chain.extra_keys, state.block_tokens)
    # What was acquired before its version was retired goes on there [V2].
    namespace = state.namespaces.take_up(owner.tenant, chain.version, chain.adapter, chain.salt, chain.scheme)
    carrier = Sequence.carrier(session, namespace, namespace.root, {})
    carrier.hint_class = state.hint_classes.number(owner.tenant, chain.hints)
    contents = _Contents(
        chain.keys if namespace.is_opaque else chain.token_ids,
        extras,
        state.writers.content_bytes(namespace),
    )
    shadows: list[Shadow] = []
    state.in_flight.add(carrier)
    try:
        carrier.chain_node = _parent_node(state, owner, parent, namespace)
        place = 0
        if len(blocks) and blocks.block_ids[0] not in owner.blocks.leased:
            place = yield from _skip_repeated(state, owner, blocks, carrier, contents, shadows)
        own = yield from _leased(state, owner, blocks, place)
        first = place
        while place < len(blocks):
            end = min(len(blocks), place + state.slice_blocks)
            reached = _publish_slice(state, owner, carrier, own[place - first : end - first], contents, place, shadows)
            if reached < end:
                yield from _make_way(state, carrier, contents.of(reached))
            elif end < len(blocks):
                yield
            place = reached
    finally:
        # Its table is empty between two slices.
        state.in_flight.discard(carrier)
        state.namespaces.disuse(namespace)
    return tuple(shadows)


class _Contents:
    """What the tree shall know the blocks of a chain by."""

    def __init__(self, joined: bytes, extras: dict[int, bytes], size: int) -> None:
        self.joined, self.extras, self.size = joined, extras, size

    def of(self, index: int) -> bytes:
        """Returns the content of one block."""
        return self.joined[index * self.size : (index + 1) * self.size] + self.extras.get(index, b"")

    def part(self, first: int, end: int) -> tuple[bytes, dict[int, bytes]]:
        """Returns the joined contents of some blocks, and their extras counted from the first of them."""
        joined = self.joined[first * self.size : end * self.size]
        if not self.extras:
            return joined, {}
        return joined, {index - first: extra for index, extra in self.extras.items() if first <= index < end}


def _publish_slice(
    state: State,
    owner: Session,
    carrier: Sequence,
    own: list[int],
    contents: _Contents,
    place: int,
    shadows: list[Shadow],
) -> int:
    """Publishes leased blocks whose contents are those from `place` on, all or as many as can be; returns the next."""
    joined, extras = contents.part(place, place + len(own))
    carrier.table, carrier.tail, carrier.extras = own, bytearray(joined), extras.copy()
    found: list[Shadow] = []
    node = carrier.chain_node
    publish_until(state, carrier, len(own), found)
    published = own[: carrier.committed_blocks]
    carrier.table, carrier.committed_blocks = [], 0
    carrier.tail.clear()
    state.writers.place(carrier, state.now)
    shadows += [Shadow(place + one.position, one.block_id, one.generation) for one in found]
    owner.blocks.leased.difference_update(published)
    nodes = _take_over(state, owner, published, node)
    reached = place + len(published)
    state.marks.advance(owner.session, nodes, place, contents.joined, contents.extras, state.now)
    return reached


def _take_over(state: State, owner: Session, own: list[int], node: int) -> list[int]:
    """Passes published blocks to their session; returns their nodes, behind that of their parent."""
    held, canonical = owner.blocks, state.blocks.canonical
    nodes = [node]
    if canonical.keys().isdisjoint(own):
        held.add(own, node)
        return nodes + own
    for block in own:
        twin = canonical.get(block)
        if twin is None:
            held.add((block,), nodes[-1])
        elif held.add_shadow(block, twin, nodes[-1]):
            state.blocks.hold((twin,))  # its shadow holds it already: that takes no room
        nodes.append(block if twin is None else twin)
    return nodes


def _make_way(state: State, carrier: Sequence, content: bytes) -> Steps[None]:
    """Evicts the cached block that stands in the next one's place.

    Operations under way have claimed all room: they evict it in any case, and there is none to revive it.
    """
    twin = state.tree.find(carrier.chain_node, content)
    if twin is not None and not state.available and twin in state.blocks.evictable:
        subtree = [twin, *state.tree.descend(twin)]
        yield from evict_all(state, subtree, carrier.session, carrier.namespace.tenant)


def _check(state: State, parent: BlockRun, blocks: BlockRun, chain: Chain) -> None:
    block_count = validate.chain(chain, state.block_tokens)
    validate.run("parent", parent)
    validate.run("blocks", blocks)
    if len(parent) > 1:
        raise InvalidField(field="parent", value=f"{len(parent)} blocks", limit="one block or none", remedy="name one")
    if len(blocks) != block_count:
        raise InvalidField(
            field="blocks",
            value=f"{len(blocks)} blocks",
            limit=f"as many as there are contents, {block_count}",
            remedy="name a block for each content",
        )


def _parent_node(state: State, owner: Session, parent: BlockRun, namespace: Namespace) -> int:
    """Returns the node that the chain is to hang below; a shadow stands for its canonical block [P7]."""
    if not len(parent):
        return namespace.root
    block, age = parent.block_ids[0], parent.generations[0]
    node = _canonical(state, owner, block, age)
    if node is None:
        raise BlockNotHeld(
            block_id=block,
            generation=age,
            remedy="hold a parent, committed or a shadow, until what is behind it is there",
        )
    if state.tree.namespace_of(node) is not namespace:
        raise InvalidField(
            field="parent", value=block, limit="a block of the chain's namespace", remedy="name the chain's own parent"
        )
    return node


def _canonical(state: State, owner: Session, block: int, age: int) -> int | None:
    """Returns the committed block that a committed block or a shadow of a session stands for."""
    if block in owner.blocks.behind:
        node = block
    elif block in owner.blocks.shadows:
        node = state.blocks.canonical[block]
    else:
        return None
    return node if state.blocks.generation[block] == age else None


def _skip_repeated(
    state: State, owner: Session, blocks: BlockRun, carrier: Sequence, contents: _Contents, shadows: list[Shadow]
) -> Steps[int]:
    """Goes past the leading blocks that are committed as these contents; returns how many they are."""
    for index, (block, age) in enumerate(zip(blocks.block_ids, blocks.generations, strict=True)):
        twin = _canonical(state, owner, block, age)
        if twin is None or state.tree.find(carrier.chain_node, contents.of(index)) != twin:
            return index
        if twin != block:
            shadows.append(Shadow(index, twin, state.blocks.generation[twin]))
        carrier.chain_node = twin
        if not (index + 1) % state.slice_blocks:
            yield  # they stay as they are: the session holds them
    return len(blocks)


def _leased(state: State, owner: Session, blocks: BlockRun, first: int) -> Steps[list[int]]:
    """Returns the blocks from `first` on: each leased by the session, and there once."""
    own, ages = blocks.block_ids.tolist()[first:], blocks.generations.tolist()[first:]
    leased, generation = owner.blocks.leased, state.blocks.generation
    seen: set[int] = set()
    for start in range(0, len(own), state.slice_blocks):
        part = own[start : start + state.slice_blocks]
        for block, age in zip(part, ages[start : start + state.slice_blocks], strict=True):
            if block not in leased or block in seen or generation[block] != age:
                raise BlockNotHeld(block_id=block, generation=age, remedy="lease blocks, and commit each once")
            seen.add(block)
        if start + len(part) < len(own):
            yield  # they stay leased: it is the session's own turn
    return own
