"""Allocate and Extend: match what is there, admit from counters, fill the table.

In slices: the match holds what it finds as it goes, and a refusal undoes that; one step admits and claims
room; filling follows and cannot fail. Matched blocks are held before anything is evicted and never count as
available, so no eviction can hit the sequence's own prefix.
"""

from array import array
from dataclasses import replace

from kvharbor.pool import explain, tables, validate
from kvharbor.pool.awaiting import Awaited
from kvharbor.pool.errors import CursorOutOfRange, RequestIdReused, RequestTooLarge
from kvharbor.pool.release import take_down
from kvharbor.pool.results import Extension, Pending, Prompt, SequenceView
from kvharbor.pool.sequence import Fingerprint, Sequence
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps
from kvharbor.pool.tree import extras_by_block


class _ComputedElsewhere(Exception):
    """Undoes a match whose next block another session is computing."""

    def __init__(self, awaited: Awaited) -> None:
        super().__init__()
        self.awaited = awaited


def allocate_unless_pending(
    state: State,
    session: int,
    prompt: Prompt,
    *,
    reserve_tokens: int,
    max_cached_tokens: int | None,
    request_id: str,
    group: str,
) -> Steps[SequenceView | Awaited]:
    """Allocates, or begins to wait for what another session is computing of the prompt; then it holds nothing [W4]."""
    try:
        view: SequenceView = yield from allocate(
            state,
            session,
            prompt,
            reserve_tokens=reserve_tokens,
            max_cached_tokens=max_cached_tokens,
            request_id=request_id,
            group=group,
            waits=True,
        )
    except _ComputedElsewhere as elsewhere:
        state.counters.pending_wait_count += 1
        return elsewhere.awaited
    return view


def allocate(
    state: State,
    session: int,
    prompt: Prompt,
    *,
    reserve_tokens: int,
    max_cached_tokens: int | None,
    request_id: str,
    group: str,
    waits: bool = False,
) -> Steps[SequenceView]:
    """Matches, holds and reserves. Nothing stays held or evicted on failure."""
    token_count = validate.prompt(prompt)
    validate.tokens("reserve_tokens", reserve_tokens)
    reusable = reusable_tokens(token_count, max_cached_tokens)
    validate.text("request_id", request_id)
    validate.text("group", group)

    owner = state.session(session)
    fingerprint: Fingerprint = {}
    if request_id:
        fingerprint = _fingerprint(prompt, reserve_tokens, max_cached_tokens, group)
        known = owner.by_request.get(request_id)
        if known is not None:
            return repeated(state, known, fingerprint)

    block_tokens = state.block_tokens
    block_count = -(-(token_count + reserve_tokens) // block_tokens)
    refuse_too_large(state, block_count)
    validate.table("reserve_tokens", reserve_tokens, block_count, "reserve less")
    tables.refuse_if_full(state, owner, block_count)

    extras = _extras(prompt, block_tokens)
    namespace = state.namespaces.use(owner.tenant, prompt.version, prompt.adapter, prompt.salt)
    sequence = Sequence(
        session=session,
        number=0,
        namespace=namespace,
        chain_node=namespace.root,
        request_id=request_id,
        group=group,
        fingerprint=fingerprint,
        table=[],
        tail=bytearray(),
        token_count=token_count,
        cached_tokens=0,
        computed_tokens=0,
        committed_blocks=0,
        extras=extras,
        hint_class=state.hint_classes.number(owner.tenant, prompt.hints),
    )
    pending = yield from admit(state, sequence, prompt.token_ids, reusable // block_tokens, block_count, waits=waits)
    sequence.number = owner.take_number()
    owner.add(sequence)
    state.in_flight.discard(sequence)

    state.tenant(owner.tenant).sequence_count += 1
    state.count_request(owner, token_count, sequence.table[: sequence.committed_blocks])
    view = state.view(sequence)
    return view if pending is None else replace(view, pending=pending)


def admit(
    state: State, sequence: Sequence, token_ids: bytes, reusable_blocks: int, block_count: int, *, waits: bool
) -> Steps[Pending | None]:
    """Gives a new sequence its matched prefix and its fresh blocks, or undoes everything and raises.

    The sequence is in `in_flight` on return, for the caller to put in its place. What is pending of its prompt is told
    as of the slice that admits it, which also enters it among the writers.
    """
    state.in_flight.add(sequence)
    try:
        run = yield from hold_match(state, sequence, token_ids, reusable_blocks)
        if waits:
            _stand_back(state, sequence, run, token_ids, reusable_blocks)
        claim_match(state, sequence, run, token_ids, reusable_blocks, block_count)
    except BaseException:
        # GeneratorExit too: the caller went away while the match was held.
        take_down(state, sequence)
        raise
    sequence.drop_published_extras()
    sequence.tail = bytearray(token_ids[4 * state.block_tokens * len(sequence.table) :])
    sequence.cached_tokens = sequence.computed_tokens = len(sequence.table) * state.block_tokens
    state.writers.place(sequence, state.now)
    pending = state.writers.pending(sequence, reusable_blocks, state.now)
    table = sequence.table
    yield from state.fill(table, block_count - len(table), sequence.session, sequence.namespace.tenant)
    return pending


def hold_match(state: State, sequence: Sequence, contents: bytes, reusable_blocks: int) -> Steps[list[int]]:
    """Matches from the root, slice by slice, holding each; returns the last run, not yet held.

    It is for `claim_match`, once the whole request is known to fit: a short prompt that is refused has then not
    even touched the order of eviction. What is held on failure is for `take_down`.
    """
    while True:
        first = len(sequence.table)
        end = min(reusable_blocks, first + state.slice_blocks)
        run = state.tree.match(sequence.chain_node, contents, sequence.extras, first, end)
        if len(run) < end - first or end == reusable_blocks:
            return run
        claim_run(state, sequence, run, 0)
        yield


def claim_match(
    state: State, sequence: Sequence, run: list[int], contents: bytes, reusable_blocks: int, block_count: int
) -> None:
    """Holds the last run of a match and claims room for the rest of the table, both or neither."""
    matched = len(sequence.table) + len(run)
    if matched * state.block_tokens < state.config.min_reuse_tokens:
        run = []
        _drop_match(state, sequence)
    claim_run(state, sequence, run, max(block_count - len(sequence.table) - len(run), 0))
    if state.history is not None and not sequence.namespace.is_opaque:
        sequence.miss = explain.end_of_match(state, state.history, sequence, contents, matched, reusable_blocks)


def claim_run(state: State, sequence: Sequence, run: list[int], fresh: int) -> None:
    """Holds a matched run and claims room for fresh blocks, both or neither."""
    available = state.available
    if fresh + len(run) > available:
        # Matched blocks that nobody holds are among the available ones, and are no room for fresh ones.
        needed = fresh + state.unheld_count(run)
        if needed > available:
            raise state.refuse(needed, available)
    state.claimed += fresh
    state.revision += 1
    if run:
        state.blocks.hold(run)
        if state.history is not None:
            state.history.traffic.matched(run, state.now)
        sequence.table += run
        sequence.committed_blocks = len(sequence.table)
        sequence.chain_node = run[-1]


def _stand_back(state: State, sequence: Sequence, run: list[int], token_ids: bytes, reusable_blocks: int) -> None:
    """Raises if another session is computing what comes behind the match."""
    awaited = state.writers.wait(
        sequence.session,
        token_ids,
        sequence.extras,
        depth=len(sequence.table) + len(run),
        reusable_blocks=reusable_blocks,
        node=run[-1] if run else sequence.chain_node,
        now=state.now,
    )
    if awaited is not None:
        raise _ComputedElsewhere(awaited)


def _drop_match(state: State, sequence: Sequence) -> None:
    state.unhold(sequence.table[::-1], sequence.namespace)
    sequence.table.clear()
    sequence.committed_blocks = 0
    sequence.chain_node = sequence.namespace.root


def extend(
    state: State, session: int, number: int, capacity_tokens: int, known_block_count: int | None
) -> Steps[Extension]:
    """Grows a table to hold `capacity_tokens`; less than it has is no change.

    The result has the blocks behind those that the caller knows of: by default, those that were added.
    """
    sequence = state.sequence(session, number)
    validate.tokens("capacity_tokens", capacity_tokens)
    before = len(sequence.table)
    known = before if known_block_count is None else known_block_count
    if not 0 <= known <= before:
        raise CursorOutOfRange(
            sequence_id=sequence.name(),
            value=known,
            limit=before,
            cursor="known_block_count",
            remedy="count the blocks that this sequence's calls have returned",
        )
    block_count = -(-capacity_tokens // state.block_tokens)
    refuse_too_large(state, block_count)
    validate.table("capacity_tokens", capacity_tokens, block_count, "use several sequences")
    fresh = max(block_count - before, 0)
    owner = state.session(session)
    if fresh:
        tables.refuse_if_full(state, owner, fresh, sequence_count=0)
    if fresh > state.available:
        raise state.refuse(fresh, state.available)
    state.claimed += fresh
    owner.entry_count += fresh
    yield from state.fill(sequence.table, fresh, session, sequence.namespace.tenant)
    added, generation = sequence.table[known:], state.blocks.generation
    return Extension(
        array("I", added),
        array("Q", [generation[block] for block in added]),
        len(sequence.table) * state.block_tokens,
    )


def reusable_tokens(token_count: int, max_cached_tokens: int | None) -> int:
    """Returns the upper bound of a match: by default all but one, as logits need one computed token."""
    if max_cached_tokens is None:
        return token_count - 1
    return validate.tokens("max_cached_tokens", max_cached_tokens, most=token_count)


def refuse_too_large(state: State, block_count: int) -> None:
    """Refuses what can never fit."""
    if block_count > state.blocks.total_count:
        raise RequestTooLarge(needed_block_count=block_count, usable_block_count=state.blocks.total_count)


def repeated(state: State, known: Sequence, fingerprint: Fingerprint) -> SequenceView:
    """Answers a duplicate request_id with the present state, or refuses other arguments."""
    had = fingerprint if known.fingerprint is None else known.fingerprint
    differs = sorted(name for name in fingerprint.keys() | had.keys() if fingerprint.get(name) != had.get(name))
    if differs:
        raise RequestIdReused(request_id=known.request_id, differs=", ".join(differs))
    return state.view(known)


def _extras(prompt: Prompt, block_tokens: int) -> dict[int, bytes]:
    return extras_by_block(prompt.extra_keys, block_tokens) if prompt.extra_keys else {}


def _fingerprint(prompt: Prompt, reserve_tokens: int, max_cached_tokens: int | None, group: str) -> Fingerprint:
    # Of the contents a hash is kept, as it only has to tell a caller's mistake from a retry.
    return {
        "token_ids": (len(prompt.token_ids), hash(prompt.token_ids)),
        "extra_keys": hash(prompt.extra_keys),
        "namespace": (prompt.version, prompt.adapter, prompt.salt),
        "reserve_tokens": reserve_tokens,
        "max_cached_tokens": max_cached_tokens,
        "group": group,
    }
