"""Resume: a session takes up its sequences after the pool was recovered, as it has them.

[L11] A session gets only what the ledger says was its own: committed blocks by (block, generation), chained below the
namespace that it names in its own tenant; RESERVED and SHADOW blocks whose word names it and their generation.

[L12] The committed part of a table is what the ledger says, and the rest of the tokens what the session says. The
session may lag behind the ledger, as a commit took effect and its reply was lost, or be ahead of it, with commits
that it could not send. So its tail begins where its own `committed_tokens` end, and with C the committed tokens by
the ledger: committed_tokens <= C <= computed_tokens, and the tail's tokens below C are those of the blocks there,
else another's content would stand for this sequence's. What is full by its `computed_tokens` is published then,
exactly as by a commit.
"""

from kvharbor.pool import pins, tables, validate
from kvharbor.pool.allocation import claim_run
from kvharbor.pool.blocks import COMMITTED, RESERVED
from kvharbor.pool.errors import CursorOutOfRange, InvalidField, RequestIdReused, StaleGeneration
from kvharbor.pool.ledger import STATE_MASK
from kvharbor.pool.lifecycle import give_back_unclaimed, settle
from kvharbor.pool.publication import publish, shadows_of
from kvharbor.pool.release import take_down
from kvharbor.pool.results import Held, Resumed
from kvharbor.pool.sequence import Sequence, Session
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps
from kvharbor.pool.tree import extras_by_block


def resume(state: State, session: int, held: Held) -> Steps[Resumed]:
    """Takes up one sequence, or refuses it and leaves its blocks to `finish_resume`."""
    owner = state.session(session)
    known = owner.sequences.get(held.number)
    if known is None:
        _check_fields(state, owner, held)
        known = yield from _restore(state, owner, held)
        yield from publish(state, known)
    committed_tokens = known.committed_blocks * state.block_tokens
    return Resumed(state.view(known), committed_tokens, tuple(shadows_of(state, known)))


def finish_resume(state: State, session: int) -> Steps[int]:
    """The session has named everything: frees its blocks that are in no sequence. Returns how many."""
    freed = yield from give_back_unclaimed(state, state.session(session))
    yield from settle(state, session)
    return freed


def _restore(state: State, owner: Session, held: Held) -> Steps[Sequence]:
    extras = extras_by_block(held.extra_keys, state.block_tokens)
    namespace = state.namespaces.take_up(owner.tenant, held.version, held.adapter, held.salt)
    sequence = Sequence(
        session=owner.session,
        number=held.number,
        namespace=namespace,
        chain_node=namespace.root,
        request_id=held.request_id,
        group=held.group,
        fingerprint=None,
        table=[],
        tail=bytearray(),
        token_count=held.token_count,
        cached_tokens=held.cached_tokens,
        computed_tokens=held.computed_tokens,
        committed_blocks=0,
        extras=extras,
    )
    state.in_flight.add(sequence)
    try:
        shadows = yield from _hold_committed(state, owner, sequence, held)
        reserved = _own_reserved(state, owner, sequence, held)
        _check_lag(state, sequence, held)
    except BaseException:
        take_down(state, sequence)
        raise
    for position, shadow in shadows.items():
        owner.unclaimed.remove(shadow)
        state.blocks.take_back_shadow(shadow, sequence.table[position])
        sequence.table[position] = shadow
    owner.unclaimed.difference_update(reserved)
    state.blocks.take_back_reserved(reserved)
    sequence.table += reserved
    committed = sequence.committed_blocks
    unknown = committed * state.block_tokens - held.committed_tokens
    sequence.tail = bytearray(held.tail_token_ids[4 * unknown :])
    sequence.drop_published_extras()
    owner.add(sequence)
    state.in_flight.discard(sequence)
    state.tenant(owner.tenant).sequence_count += 1
    state.revision += 1
    if held.pin_name:
        pins.link(state, sequence, held.pin_name)
    return sequence


def _hold_committed(state: State, owner: Session, sequence: Sequence, held: Held) -> Steps[dict[int, int]]:
    """Holds the leading run of committed blocks, slice by slice; returns its own shadows among them by position."""
    shadows: dict[int, int] = {}
    node, block_count = sequence.chain_node, len(held.block_ids)
    while True:
        run: list[int] = []
        first = len(sequence.table)
        end = min(block_count, first + state.slice_blocks)
        for position in range(first, end):
            canonical = _canonical_at(state, owner, held, position, node)
            if canonical is None:
                break
            if canonical != held.block_ids[position]:
                shadows[position] = held.block_ids[position]
            run.append(canonical)
            node = canonical
        claim_run(state, sequence, run, 0)
        if len(sequence.table) < end or end == block_count:
            return shadows
        yield


def _canonical_at(state: State, owner: Session, held: Held, position: int, node: int) -> int | None:
    """Returns the committed block below `node` that a position stands for; None for a reserved block."""
    block, age = held.block_ids[position], held.generations[position]
    blocks = state.blocks
    if not blocks.first_block <= block < len(blocks.state) or blocks.generation[block] != age:
        raise _stale(owner, held, position)
    if blocks.state[block] == COMMITTED:
        if state.tree.parent[block] != node:
            raise _stale(owner, held, position)
        return block
    if block not in owner.unclaimed:
        raise _stale(owner, held, position)
    if state.ledger.words[block] & STATE_MASK == RESERVED:
        return None
    records = state.ledger.records
    canonical = None
    content = records.recorded(block, blocks.generation, is_opaque=False)
    if content is not None and records.parents[block] == node:
        canonical = state.tree.find(node, content)
    if canonical is None:
        raise _stale(owner, held, position)
    return canonical


def _own_reserved(state: State, owner: Session, sequence: Sequence, held: Held) -> list[int]:
    """Returns the blocks behind the committed ones: each the session's own RESERVED one, and there once."""
    first = sequence.committed_blocks
    reserved = list(held.block_ids[first:])
    words, generation = state.ledger.words, state.blocks.generation
    seen: set[int] = set()
    for position, (block, age) in enumerate(zip(reserved, held.generations[first:], strict=True), start=first):
        if (
            block not in owner.unclaimed
            or block in seen
            or words[block] & STATE_MASK != RESERVED
            or generation[block] != age
        ):
            raise _stale(owner, held, position)
        seen.add(block)
    return reserved


def _check_lag(state: State, sequence: Sequence, held: Held) -> None:
    """What is committed has the contents that the session has for these positions [L12]."""
    block_tokens, committed = state.block_tokens, sequence.committed_blocks
    first = held.committed_tokens // block_tokens
    if committed < first:
        raise CursorOutOfRange(
            sequence_id=sequence.name(),
            value=held.committed_tokens,
            limit=committed * block_tokens,
            cursor="committed_tokens",
            remedy="send the tokens from the last committed block on",
        )
    if held.computed_tokens < committed * block_tokens:
        raise InvalidField(
            field="computed_tokens",
            value=held.computed_tokens,
            limit=f"at least {committed * block_tokens}, which are committed",
            remedy="count the commits that were sent",
        )
    for position in range(first, committed):
        offset = 4 * block_tokens * (position - first)
        content = state.tree.content(held.tail_token_ids, offset, sequence.extras.get(position))
        if state.tree.content_of(sequence.table[position]) != content:
            raise InvalidField(
                field="tail_token_ids",
                value=f"of other content than the block at position {position}",
                limit="the tokens that were committed there",
                remedy="the sequence is lost: allocate it again",
            )


def _check_fields(state: State, owner: Session, held: Held) -> None:
    block_tokens = state.block_tokens
    if not 1 <= held.number < state.first_number:
        raise InvalidField(
            field="sequence_id", value=held.number, limit="a handle of before", remedy="resume only what was there"
        )
    validate.text("request_id", held.request_id)
    validate.text("group", held.group)
    validate.text("pin_name", held.pin_name)
    validate.namespace(held.version, held.adapter, held.salt)
    validate.table("block_ids", len(held.block_ids), len(held.block_ids), "the pool gives no longer ones")
    tables.refuse_if_never_had(state, owner, len(held.block_ids))
    if held.request_id in owner.by_request:
        raise RequestIdReused(request_id=held.request_id, differs="sequence_id")
    if len(held.generations) != len(held.block_ids):
        raise InvalidField(
            field="generations",
            value=f"{len(held.generations)} entries",
            limit=f"{len(held.block_ids)} entries, one a block",
            remedy="send the table as it came",
        )
    cursors = (0, held.cached_tokens, held.computed_tokens, held.token_count, len(held.block_ids) * block_tokens)
    if list(cursors) != sorted(cursors):
        raise InvalidField(
            field="cursors",
            value=", ".join(map(str, cursors[1:])),
            limit="cached_tokens <= computed_tokens <= token_count <= capacity_tokens",
            remedy="send them as they are",
        )
    committed = held.committed_tokens
    if committed % block_tokens or not 0 <= committed <= held.computed_tokens:
        raise InvalidField(
            field="committed_tokens",
            value=committed,
            limit=f"whole blocks of {block_tokens} tokens, at most computed_tokens",
            remedy="send what the last commit has reported",
        )
    tail_count = validate.token_count(held.tail_token_ids, "tail_token_ids")
    if tail_count != held.token_count - committed:
        raise InvalidField(
            field="tail_token_ids",
            value=f"{tail_count} tokens",
            limit=f"the {held.token_count - committed} tokens behind committed_tokens",
            remedy="send all tokens that are not committed",
        )
    validate.listed("extra_keys", len(held.extra_keys), validate.MAX_EXTRA_KEYS)
    validate.extra_keys(held.extra_keys, committed, held.token_count)


def _stale(owner: Session, held: Held, position: int) -> StaleGeneration:
    return StaleGeneration(
        sequence_id=f"{owner.session}.{held.number}",
        position=position,
        block_id=held.block_ids[position],
        generation=held.generations[position],
        current_block_id=0,
        current_generation=0,
    )
