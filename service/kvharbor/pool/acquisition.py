"""Acquire and Lease: blocks for a session itself. And Abandon: what it has acquired to compute, and does not.

An Acquire matches and admits exactly as an Allocate does, with a sequence that carries what it holds until then; then
the session's set takes it over.
"""

from kvharbor.pool import validate
from kvharbor.pool.allocation import claim_match, hold_match, refuse_too_large
from kvharbor.pool.block_runs import BlockRun, Chain
from kvharbor.pool.errors import InvalidField
from kvharbor.pool.marks import Mark
from kvharbor.pool.release import give_back, take_down
from kvharbor.pool.results import Acquired, Pending
from kvharbor.pool.sequence import Sequence, Session
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps
from kvharbor.pool.tree import extras_by_block
from kvharbor.pool.writers import PATIENCE_S


def acquire(
    state: State,
    session: int,
    chain: Chain,
    table_block_count: int,
    *,
    computes: bool,
    uses: bool,
    unless_pending: bool,
) -> Steps[Acquired]:
    """Holds what is there of a chain and leases the rest of its table. Nothing stays held or evicted on failure.

    One that is granted counts as a request with the tokens of the chain, unless it only asks. One `unless_pending` is
    given nothing where that is worth waiting for [W8].
    """
    block_count = validate.chain(chain, state.block_tokens)
    _check_count("table_block_count", table_block_count, 0)
    owner = state.session(session)
    refuse_too_large(state, table_block_count)
    most = max(table_block_count, block_count)
    validate.table("table_block_count", table_block_count, most, "ask for less")

    extras = extras_by_block(chain.extra_keys, state.block_tokens)
    namespace = state.namespaces.use(owner.tenant, chain.version, chain.adapter, chain.salt, chain.scheme)
    carrier = Sequence.carrier(session, namespace, namespace.root, extras)
    contents = chain.keys if namespace.is_opaque else chain.token_ids
    state.in_flight.add(carrier)
    try:
        run = yield from hold_match(state, carrier, contents, block_count)
        if unless_pending:
            elsewhere = _pending_elsewhere(state, carrier, run, contents, block_count)
            if elsewhere is not None:
                yield from _shorten(state, carrier)
                nothing = state.run(())
                return Acquired(nothing, nothing, elsewhere, nothing, stands_back=True)
        claim_match(state, carrier, run, contents, block_count, table_block_count)
        held = carrier.table.copy()
        carrier.tail = bytearray(contents[state.writers.content_bytes(namespace) * len(held) :])
        pending = state.writers.pending(carrier, block_count, state.now)
        # Where another is the writer, who asks may wait for that: two who do must not wait for each other.
        is_writer = computes and (pending is None or pending.idle_s >= PATIENCE_S)
        added = [block for block in held if not owner.blocks.holds(block)]
        if len(held) > state.slice_blocks:
            if is_writer:
                state.writers.place(carrier, state.now)
            yield from _share(state, owner, carrier, contents)
        else:
            _take_over(state, owner, carrier, contents)
        if is_writer and len(held) < block_count:
            _mark(state, carrier, len(held))
        state.writers.remove(carrier)
        yield from _shorten(state, carrier)
    finally:
        # After a success little is left of it but its use of the namespace.
        take_down(state, carrier)
    if table_block_count or computes or uses:  # else it was only asked, perhaps again and again
        state.count_request(owner, block_count * state.block_tokens, held)
    leased = yield from _lease(state, owner, max(table_block_count - len(held), 0), held[-1] if held else None)
    table = state.run(held)
    return Acquired(table, leased, pending, table if len(added) == len(held) else state.run(added))


def lease(state: State, session: int, least: int, want: int) -> Steps[BlockRun]:
    """Reserves fresh blocks for a session: as many of `want` as there is room for, `least` of them or none."""
    _check_count("want_block_count", want, 1)
    _check_count("least_block_count", least, 0, want)
    validate.table("want_block_count", want, want, "lease in several calls")
    owner = state.session(session)
    refuse_too_large(state, least)
    available = state.available
    if least > available:
        raise state.refuse(least, available)
    count = min(want, available)
    state.claimed += count
    return (yield from _lease(state, owner, count, None))


def abandon(state: State, session: int, chain: Chain) -> Steps[None]:
    """Ends a session's marks of just these contents, slice by slice [B8]."""
    block_count = validate.chain(chain, state.block_tokens)
    owner = state.session(session)
    namespace = state.namespaces.find(owner.tenant, chain.version, chain.adapter, chain.salt, chain.scheme)
    if namespace is None:
        return
    extras = extras_by_block(chain.extra_keys, state.block_tokens)
    contents = chain.keys if namespace.is_opaque else chain.token_ids
    node, place = namespace.root, 0
    while session in state.marks.by_session:
        end = min(block_count, place + state.slice_blocks)
        run = state.tree.match(node, contents, extras, place, end)
        state.marks.abandon(session, [node, *run], place, contents, extras)
        place += len(run)
        # Behind what the session does not hold, which may be gone after a slice, it has none.
        if place < end or place == block_count or run[-1] not in owner.blocks.behind:
            return
        node = run[-1]
        yield


def _lease(state: State, owner: Session, count: int, after: int | None) -> Steps[BlockRun]:
    """Makes claimed blocks leased ones."""
    held = owner.blocks
    yield from state.fill(held.fresh, count, owner.session, owner.tenant, after)
    leased, held.fresh = held.fresh, []
    held.leased.update(leased)
    return state.run(leased)


def _pending_elsewhere(
    state: State, carrier: Sequence, run: list[int], contents: bytes, block_count: int
) -> Pending | None:
    """Tells what another session computes of a chain, behind what a carrier and a run have of it [W8]."""
    node, depth = run[-1] if run else carrier.chain_node, len(carrier.table) + len(run)
    size = state.writers.content_bytes(carrier.namespace)
    content = contents[size * depth : size * (depth + 1)] + carrier.extras.get(depth, b"")
    if not state.writers.is_computed(node, content):
        return None
    tail = bytearray(contents[size * depth :])
    ahead = Mark(carrier.session, carrier.namespace, node, depth, tail, carrier.extras)
    return state.writers.worth_waiting_for(ahead, block_count, state.now)


def _shorten(state: State, carrier: Sequence) -> Steps[None]:
    """Gives back what a carrier holds but for a slice, slice by slice."""
    while len(carrier.table) > state.slice_blocks:
        give_back(state, carrier, len(carrier.table) - state.slice_blocks)
        yield


def _share(state: State, owner: Session, carrier: Sequence, contents: bytes) -> Steps[None]:
    """Lets a session hold what a carrier holds, slice by slice."""
    node = carrier.namespace.root
    for start in range(0, len(carrier.table), state.slice_blocks):
        part = carrier.table[start : start + state.slice_blocks]
        state.blocks.hold(owner.blocks.add(part, node))
        _advance(state, carrier, node, part, start, contents)
        node = part[-1]
        state.revision += 1
        yield


def _take_over(state: State, owner: Session, carrier: Sequence, contents: bytes) -> None:
    """Passes what a carrier holds to its session, which may have some of it already."""
    chain, carrier.table, carrier.committed_blocks = carrier.table, [], 0
    known_count = len(chain) - len(owner.blocks.add(chain, carrier.namespace.root))
    state.blocks.unhold(reversed(chain[:known_count]))
    _advance(state, carrier, carrier.namespace.root, chain, 0, contents)
    state.revision += 1


def _advance(state: State, carrier: Sequence, node: int, blocks: list[int], first: int, contents: bytes) -> None:
    """Moves a session's marks over blocks of its chain from `first` on, behind `node`, that it holds now [B6]."""
    if carrier.session in state.marks.by_session:
        nodes = [node, *blocks]
        state.marks.advance(carrier.session, nodes, first, contents, carrier.extras, state.now)


def _mark(state: State, carrier: Sequence, depth: int) -> None:
    tail = bytearray(carrier.tail)
    mark = Mark(carrier.session, carrier.namespace, carrier.chain_node, depth, tail, carrier.extras)
    state.marks.add(mark, state.now)


def _check_count(field: str, value: int, least: int, most: int = validate.MAX_TABLE_BLOCKS) -> None:
    if not least <= value <= most:
        raise InvalidField(
            field=field, value=value, limit=f"{least} to {most}", remedy="ask for a number in that range"
        )
