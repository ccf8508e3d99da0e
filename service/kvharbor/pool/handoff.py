"""Handoff and Adopt: a sequence moves to another session, partial tail included, and nothing is copied."""

from kvharbor.pool import tables, validate
from kvharbor.pool.digest import decode_extra_keys
from kvharbor.pool.errors import HandoffNotFound, RequestIdReused
from kvharbor.pool.publication import commit
from kvharbor.pool.release import finish_release
from kvharbor.pool.results import Adopted, Commit, HandedOff
from kvharbor.pool.sequence import Fingerprint, Sequence
from kvharbor.pool.state import Handoff, State
from kvharbor.pool.steps import Steps


def handoff(
    state: State, session: int, number: int, asked: Commit, *, token: str, expires_at: float
) -> Steps[HandedOff]:
    """Commits, then gives the sequence to the token; the source's handle ends.

    Repeated for a sequence that is not adopted yet, it tells the first one's token.
    """
    given = state.handoff_tokens.get((session, number))
    if given is not None:
        return HandedOff(given, state.handoffs[given].expires_at)
    sequence = state.sequence(session, number)
    yield from commit(state, session, number, asked)
    owner = state.session(session)
    owner.remove(sequence)
    owner.given_entry_count += sequence.entry_count
    state.move(sequence, session=0, number=0)
    state.handoffs[token] = Handoff(sequence, owner.tenant, expires_at, (session, number))
    state.handoff_tokens[session, number] = token
    return HandedOff(token, expires_at)


def adopt(state: State, session: int, token: str, *, request_id: str, group: str) -> Adopted:
    """Takes a handed-off sequence into a session of the same tenant, once; repeated by `request_id`."""
    validate.text("request_id", request_id)
    validate.text("group", group)
    owner = state.session(session)
    fingerprint: Fingerprint = {"handoff_token": hash(token)}
    known = owner.by_request.get(request_id) if request_id else None
    if known is not None:
        if known.fingerprint not in (None, fingerprint):
            raise RequestIdReused(request_id=request_id, differs="handoff_token")
        return _adopted(state, known)
    given = state.handoffs.get(token)
    if given is None or given.tenant != owner.tenant:
        raise HandoffNotFound()
    if given.source[0] != session:
        tables.refuse_if_full(state, owner, len(given.sequence.table))
    sequence = _end(state, token)
    state.move(sequence, session=session, number=owner.take_number())
    sequence.request_id, sequence.group, sequence.fingerprint = request_id, group, fingerprint
    sequence.cached_tokens = sequence.computed_tokens
    owner.add(sequence)
    return _adopted(state, sequence)


def expire(state: State, now: float) -> Steps[None]:
    """Releases what nobody has adopted in time."""
    due = [token for token, given in state.handoffs.items() if given.expires_at <= now]
    expired = [_end(state, token) for token in due]
    state.in_flight.update(expired)
    for sequence in expired:
        yield from finish_release(state, sequence)


def _end(state: State, token: str) -> Sequence:
    given = state.handoffs.pop(token)
    del state.handoff_tokens[given.source]
    giver = state.sessions.get(given.source[0])
    if giver is not None:
        giver.given_entry_count -= given.sequence.entry_count
    return given.sequence


def _adopted(state: State, sequence: Sequence) -> Adopted:
    _, version, adapter, salt, _ = sequence.namespace.key
    keys = [
        key
        for block, encoded in sorted(sequence.extras.items())
        for key in decode_extra_keys(encoded, block * state.block_tokens)
    ]
    return Adopted(
        view=state.view(sequence),
        version=version,
        adapter=adapter,
        salt=salt,
        committed_tokens=sequence.committed_blocks * state.block_tokens,
        tail_token_ids=bytes(sequence.tail),
        extra_keys=tuple(keys),
    )
