"""Fork: children share what is published and get their own copy of what is not.

The copy is the caller's work, between `fork` and `finish_fork`: whole pages, source to destination. Until then
source and children cannot be released, handed off or committed, and no block of theirs can be freed, not even
by the end of their session: a late copy would land in somebody else's block.
"""

from kvharbor.pool import tables, validate
from kvharbor.pool.allocation import refuse_too_large
from kvharbor.pool.errors import InvalidField, RequestIdReused
from kvharbor.pool.release import detach, drop_private, finish_release
from kvharbor.pool.results import Fork, SequenceView
from kvharbor.pool.sequence import Fingerprint, Sequence, Session
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps, finish

MAX_CHILDREN = 1024


def fork(
    state: State,
    session: int,
    number: int,
    child_count: int,
    *,
    reserve_tokens: int,
    request_id: str,
    group: str,
) -> Steps[Fork]:
    """Makes children with room beyond the known tokens. All or none; a repeated request_id finds its children."""
    if not 1 <= child_count <= MAX_CHILDREN:
        raise InvalidField(
            field="child_count",
            value=child_count,
            limit=f"1 to {MAX_CHILDREN}",
            remedy="fork in several calls",
        )
    validate.tokens("reserve_tokens", reserve_tokens)
    # The index is part of each child's request_id.
    validate.text("request_id", request_id, validate.MAX_NAME_BYTES - 5)
    validate.text("group", group)
    owner = state.session(session)
    fingerprint: Fingerprint = {
        "source": number,
        "child_count": child_count,
        "reserve_tokens": reserve_tokens,
        "group": group,
    }
    if request_id and (known := _repeated(state, owner, request_id, child_count, fingerprint)) is not None:
        return Fork(session, number, known, ())
    source = state.sequence(session, number)
    state.refuse_if_copying(source)

    block_tokens = state.block_tokens
    shared = source.committed_blocks
    written = -(-source.computed_tokens // block_tokens)
    block_count = max(-(-(source.token_count + reserve_tokens) // block_tokens), written)
    fresh = (block_count - shared) * child_count
    # The source keeps its table, so children that do not fit beside it never will.
    refuse_too_large(state, len(source.table) + fresh)
    validate.table("child_count", child_count, block_count * child_count, "fork in several calls")
    tables.refuse_if_full(state, owner, block_count * child_count, child_count)
    if fresh > state.available:
        raise state.refuse(fresh, state.available)
    state.claimed += fresh

    source.copy_count += 1
    prefix = [state.blocks.canonical.get(block, block) for block in source.table[:shared]]
    children: list[int] = []
    copies: list[tuple[int, int]] = []
    for index in range(child_count):
        source.namespace.user_count += 1
        child = Sequence(
            session=session,
            number=owner.take_number(),
            namespace=source.namespace,
            chain_node=source.chain_node,
            request_id=_child_id(request_id, index) if request_id else "",
            group=group,
            fingerprint=fingerprint,
            table=[],
            tail=bytearray(source.tail),
            token_count=source.token_count,
            cached_tokens=source.computed_tokens,
            computed_tokens=source.computed_tokens,
            committed_blocks=0,
            extras=dict(source.extras),
            hint_class=source.hint_class,
            copy_count=1,
        )
        state.in_flight.add(child)
        state.tenant(owner.tenant).sequence_count += 1
        yield from _share(state, child, prefix)
        yield from state.fill(child.table, block_count - shared, session, owner.tenant)
        copies += zip(source.table[shared:written], child.table[shared:written], strict=True)
        children.append(child.number)
        owner.add(child)
        state.writers.place(child, state.now)
        state.in_flight.discard(child)
        if len(children) * block_count // state.slice_blocks > index * block_count // state.slice_blocks:
            yield
    return Fork(session, number, tuple(children), tuple(copies))


def _share(state: State, child: Sequence, prefix: list[int]) -> Steps[None]:
    for start in range(0, len(prefix), state.slice_blocks):
        part = prefix[start : start + state.slice_blocks]
        state.blocks.hold(part)
        child.table += part
        child.committed_blocks = len(child.table)
        state.revision += 1
        if child.committed_blocks < len(prefix):
            yield


def finish_fork(state: State, made: Fork) -> tuple[SequenceView, ...]:
    """Publishes the children: their copies are written."""
    owner = state.sessions[made.session]
    children = [owner.sequences[number] for number in made.children]
    views = tuple(state.view(child) for child in children)
    if any(child.copy_count for child in children):
        state.counters.copied_block_count += len(made.copies)
        _end_copies(state, owner, made)
    return views


def abort_fork(state: State, made: Fork) -> None:
    """Undoes a fork whose copies failed; none of them is still running."""
    owner = state.sessions[made.session]
    children = [owner.sequences[number] for number in made.children]
    _end_copies(state, owner, made)
    if not owner.quiet:
        for child in children:
            detach(state, owner, child)
            finish(finish_release(state, child))


def _end_copies(state: State, owner: Session, made: Fork) -> None:
    for number in (made.source, *made.children):
        sequence = owner.sequences[number]
        sequence.copy_count -= 1
        if owner.quiet and not sequence.copy_count:
            detach(state, owner, sequence)
            finish(finish_release(state, sequence))
        elif owner.writers_quiet and not sequence.copy_count:
            finish(drop_private(state, sequence))
    state.forget_if_over(owner)


def _repeated(
    state: State, owner: Session, request_id: str, child_count: int, fingerprint: Fingerprint
) -> tuple[int, ...] | None:
    """Returns the children that a repeated request_id made, or None if none of the names is in use."""
    found = [owner.by_request.get(_child_id(request_id, index)) for index in range(child_count)]
    known = [child for child in found if child is not None]
    if not known:
        return None
    if len(known) < child_count or any(child.fingerprint not in (None, fingerprint) for child in known):
        raise RequestIdReused(request_id=request_id, differs="fork, or some of its children are released")
    for child in known:
        state.refuse_if_copying(child)
    return tuple(child.number for child in known)


def _child_id(request_id: str, index: int) -> str:
    return f"{request_id}/{index}"
