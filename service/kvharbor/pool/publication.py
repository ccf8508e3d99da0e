"""Commit: what is written becomes what others may read.

An index entry asserts "these bytes are these tokens", so it is made here and never at allocation [P1]. A block
whose content is there already becomes a SHADOW of the canonical one [P7].
"""

from kvharbor.pool import pins, tables, validate
from kvharbor.pool.block_runs import BlockRun
from kvharbor.pool.blocks import SHADOW
from kvharbor.pool.cells import NO_CELL
from kvharbor.pool.errors import (
    BlockNotHeld,
    CommitBackwards,
    CursorOutOfRange,
    InvalidField,
    PoolError,
    StaleGeneration,
)
from kvharbor.pool.events import BlocksStored
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.repeats import has_taken_effect
from kvharbor.pool.results import Commit, Committed, Shadow
from kvharbor.pool.sequence import Sequence
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps
from kvharbor.pool.tree import extras_by_block


def commit(state: State, session: int, number: int, asked: Commit) -> Steps[Committed]:
    """Moves the cursors and publishes every block that is full. Checks everything before it changes anything."""
    sequence = state.sequence(session, number)
    state.refuse_if_copying(sequence)
    before = len(sequence.table)
    if asked.appended is not None:
        sequence.table += _appended(state, sequence, asked.appended)
    try:
        is_repeat = asked.known_token_count is not None and has_taken_effect(state, sequence, asked)
        new_count = 0 if is_repeat else _check(state, sequence, asked)
        extras = _extras(state, sequence, asked) if new_count and asked.extra_keys else {}
        if asked.switched:
            _check_switched(sequence, asked)
    except PoolError:
        del sequence.table[before:]
        raise

    if len(sequence.table) > before:
        owner = state.session(session)
        owner.blocks.leased.difference_update(sequence.table[before:])
        owner.entry_count += len(sequence.table) - before
        state.revision += 1
    for position in asked.switched:
        _switch(state, sequence, position)
    if new_count:
        sequence.extras.update(extras)
        sequence.tail += asked.new_token_ids
        sequence.token_count += new_count
    if asked.computed_tokens > sequence.computed_tokens:
        sequence.computed_tokens = asked.computed_tokens
        state.writers.note_progress(sequence, state.now)
    shadows = yield from publish(state, sequence)
    if is_repeat:
        shadows = shadows_of(state, sequence)
    return Committed(sequence.committed_blocks * state.block_tokens, tuple(shadows))


def publish(state: State, sequence: Sequence) -> Steps[list[Shadow]]:
    """Publishes every block that is full of computed tokens; returns those that became shadows."""
    shadows: list[Shadow] = []
    full_blocks = sequence.computed_tokens // state.block_tokens
    if sequence.committed_blocks >= full_blocks:
        state.writers.place(sequence, state.now)  # its tokens may have become more
    while sequence.committed_blocks < full_blocks:
        wanted = min(full_blocks, sequence.committed_blocks + state.slice_blocks)
        publish_until(state, sequence, wanted, shadows)
        if sequence.committed_blocks < wanted:
            break
        if wanted < full_blocks:
            yield
    return shadows


def shadows_of(state: State, sequence: Sequence) -> list[Shadow]:
    """Returns every shadow in a table."""
    canonical, generation = state.blocks.canonical, state.blocks.generation
    committed = sequence.table[: sequence.committed_blocks] if canonical else ()
    return [
        Shadow(position, canonical[block], generation[canonical[block]])
        for position, block in enumerate(committed)
        if block in canonical
    ]


def _appended(state: State, sequence: Sequence, blocks: BlockRun) -> list[int]:
    """Returns the leased blocks that a table is to grow by, without those that are in it already [B5]."""
    validate.run("appended", blocks)
    longest = len(sequence.table) + len(blocks)
    validate.table("appended", len(blocks), longest, "use several sequences")
    owner, generation = state.session(sequence.session), state.blocks.generation
    leased = owner.blocks.leased
    # The table is only looked through for a repetition, and once: it may be long.
    there = set[int]() if leased.issuperset(blocks.block_ids) else set(sequence.table)
    added: dict[int, None] = {}
    for block, age in zip(blocks.block_ids, blocks.generations, strict=True):
        is_here = block in leased or block in there
        if not is_here or block in added or generation[block] != age:
            raise BlockNotHeld(block_id=block, generation=age, remedy="append leased blocks, each once")
        if block in leased:
            added[block] = None
    if added:
        tables.refuse_if_full(state, owner, len(added), sequence_count=0)
    return list(added)


def _check(state: State, sequence: Sequence, asked: Commit) -> int:
    new_count = validate.token_count(asked.new_token_ids, "new_token_ids")
    token_count = sequence.token_count + new_count
    capacity = len(sequence.table) * state.block_tokens
    computed = asked.computed_tokens
    if token_count > capacity:
        raise CursorOutOfRange(
            sequence_id=sequence.name(),
            value=token_count,
            limit=capacity,
            cursor="token_count",
            remedy="extend the sequence first",
        )
    if not 0 <= computed <= token_count:
        raise CursorOutOfRange(
            sequence_id=sequence.name(),
            value=computed,
            limit=token_count,
            cursor="computed_tokens",
            remedy="only known tokens can be computed: send new_token_ids with the commit",
        )
    if computed < sequence.computed_tokens:
        raise CommitBackwards(
            sequence_id=sequence.name(),
            computed_tokens=sequence.computed_tokens,
            requested_tokens=computed,
        )
    if asked.extra_keys:
        validate.extra_keys(asked.extra_keys, sequence.token_count, token_count)
    if asked.written is not None:
        _check_written(state, sequence, asked)
    return new_count


def _extras(state: State, sequence: Sequence, asked: Commit) -> dict[int, bytes]:
    """Returns the extras of the blocks that get new extra keys; the first may have some of earlier commits."""
    return {
        block: validate.block_extra(sequence.extras.get(block, b"") + extra, state.block_tokens)
        for block, extra in extras_by_block(asked.extra_keys, state.block_tokens).items()
    }


def _check_switched(sequence: Sequence, asked: Commit) -> None:
    for position in asked.switched:
        if not 0 <= position < sequence.committed_blocks:
            raise InvalidField(
                field="switched_positions",
                value=position,
                limit=f"a committed position, 0 to {sequence.committed_blocks - 1}",
                remedy="switch only shadows that a commit has reported",
            )


def _check_written(state: State, sequence: Sequence, asked: Commit) -> None:
    block_ids, generations = asked.written or ((), ())
    first = sequence.computed_tokens // state.block_tokens
    end = -(-asked.computed_tokens // state.block_tokens)
    if asked.computed_tokens == sequence.computed_tokens:
        end = first
    if len(block_ids) != end - first or len(generations) != end - first:
        raise InvalidField(
            field="written",
            value=f"{len(block_ids)} blocks with {len(generations)} generations",
            limit=f"the {end - first} blocks of tokens [{sequence.computed_tokens}, {asked.computed_tokens})",
            remedy="name each block from the previous computed_tokens on, or none",
        )
    generation = state.blocks.generation
    for position, named, age in zip(range(first, end), block_ids, generations, strict=True):
        block = sequence.table[position]
        if block != named or generation[block] != age:
            raise StaleGeneration(
                sequence_id=sequence.name(),
                position=position,
                block_id=named,
                generation=age,
                current_block_id=block,
                current_generation=generation[block],
            )


def _switch(state: State, sequence: Sequence, position: int) -> None:
    """Replaces a shadow by its canonical block; switched already is fine."""
    block = sequence.table[position]
    if state.blocks.state[block] == SHADOW:
        sequence.table[position] = state.blocks.unshadow(block)
        state.revision += 1


def publish_until(state: State, sequence: Sequence, end: int, shadows: list[Shadow]) -> None:
    """Publishes blocks [committed_blocks, end) in one slice, or as many as can be."""
    first = sequence.committed_blocks
    size = state.writers.content_bytes(sequence.namespace)
    contents = _contents(sequence, size, end)
    state.revision += 1
    while (done := sequence.committed_blocks - first) < len(contents):
        position = sequence.committed_blocks
        own = sequence.table[position:end]
        digests = state.tree.insert_chain(own, sequence.chain_node, contents[done:], sequence.namespace)
        if digests:
            published = own[: len(digests)]
            _record(state, sequence, published, contents[done:], digests)
            if state.awaiting.by_key:
                state.awaiting.move(state.tree.keys(published))
            state.blocks.commit(published)
            state.engines.published(state.sessions[sequence.session].engine, published, sequence.chain_node)
            state.blocks.evictable.publish_many(published, digests, sequence.hint_class)
            if state.history is not None:
                state.history.traffic.published(published, digests, state.now)
            _announce(state, sequence, published, digests)
            _advance(state, sequence, published)
        else:
            holder = state.tree.find(sequence.chain_node, contents[done])
            assert holder is not None  # insert_chain stopped at it
            if not state.available and holder in state.blocks.evictable:
                # Operations under way have claimed all room, so the canonical block cannot be revived. The
                # rest stays reserved; the next commit publishes it. At worst a later hit is a miss.
                break
            _record(state, sequence, own[:1], contents[done : done + 1], [state.tree.digest_of(holder)])
            state.blocks.shadow(own[0], holder, sequence.session)
            state.counters.shadow_block_count += 1
            shadows.append(Shadow(position, holder, state.blocks.generation[holder]))
            _advance(state, sequence, [holder])
    published_blocks = range(first, sequence.committed_blocks)
    del sequence.tail[: len(published_blocks) * size]
    if sequence.extras:
        for position in published_blocks:
            sequence.extras.pop(position, None)
    state.writers.place(sequence, state.now)


def _record(state: State, sequence: Sequence, chain: list[int], contents: list[bytes], digests: list[bytes]) -> None:
    """Tells the ledger what the next blocks of a sequence hold; their words follow [L2]."""
    namespace, generation, parent = sequence.namespace, state.blocks.generation, sequence.chain_node
    parent_age = 0 if parent >= FIRST_ROOT else generation[parent]
    if namespace.cell == NO_CELL:
        state.namespaces.record(namespace)
    records = state.ledger.records
    records.write(chain, parent, contents, digests, generation, parent_age, is_opaque=namespace.is_opaque)


def _contents(sequence: Sequence, block_bytes: int, end: int) -> list[bytes]:
    """Returns what the tree shall know blocks [committed_blocks, end) by."""
    first, extras = sequence.committed_blocks, sequence.extras
    with memoryview(sequence.tail) as view:
        tokens = view[: (end - first) * block_bytes].tobytes()
    contents = [tokens[start : start + block_bytes] for start in range(0, len(tokens), block_bytes)]
    if extras:
        contents = [content + extras.get(first + index, b"") for index, content in enumerate(contents)]
    return contents


def _advance(state: State, sequence: Sequence, chain: list[int]) -> None:
    """Moves a sequence past blocks that are published now, its own or canonical ones."""
    pin = sequence.pin
    if pin is not None and (promised := chain[: max(0, pin.block_count - sequence.committed_blocks)]):
        state.blocks.pin(promised)
        pin.blocks += promised
        pin.promised -= len(promised)
        state.promised -= len(promised)
        pins.record_tail(state, pin)
    sequence.committed_blocks += len(chain)
    sequence.chain_node = chain[-1]


def _announce(state: State, sequence: Sequence, chain: list[int], digests: list[bytes]) -> None:
    tenant, generation = sequence.namespace.tenant, state.blocks.generation
    state.counters.committed_block_count += len(chain)
    state.tenant(tenant).committed_block_count += len(chain)
    state.events.append(
        BlocksStored(
            state.revision,
            tenant,
            state.tree.digest_of(sequence.chain_node),
            tuple(digests),
            tuple(chain),
            tuple([generation[block] for block in chain]),
        )
    )
