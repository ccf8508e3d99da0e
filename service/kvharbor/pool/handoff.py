"""Handoff and Adopt: a sequence moves to another session, partial tail included, and nothing is copied."""

from kvharbor.pool import validate
from kvharbor.pool.errors import HandoffNotFound, RequestIdReused
from kvharbor.pool.publication import commit
from kvharbor.pool.release import finish_release
from kvharbor.pool.results import Commit, SequenceView
from kvharbor.pool.state import Handoff, State
from kvharbor.pool.steps import Steps


def handoff(state: State, session: int, number: int, asked: Commit, *, token: str, expires_at: float) -> Steps[None]:
    """Commits, then gives the sequence to the token; the source's handle ends."""
    sequence = state.sequence(session, number)
    yield from commit(state, session, number, asked)
    owner = state.session(session)
    owner.remove(sequence)
    sequence.session = sequence.number = 0
    state.handoffs[token] = Handoff(sequence, owner.tenant, expires_at)
    state.revision += 1


def adopt(state: State, session: int, token: str, *, request_id: str, group: str) -> SequenceView:
    """Takes a handed-off sequence into a session of the same tenant, once."""
    validate.text("request_id", request_id)
    validate.text("group", group)
    owner = state.session(session)
    fingerprint: dict[str, object] = {"handoff_token": hash(token)}
    known = owner.by_request.get(request_id) if request_id else None
    if known is not None:
        if known.fingerprint != fingerprint:
            raise RequestIdReused(request_id=request_id, differs="handoff_token")
        return state.view(known)
    given = state.handoffs.get(token)
    if given is None or given.tenant != owner.tenant:
        raise HandoffNotFound()
    del state.handoffs[token]
    sequence = given.sequence
    sequence.session, sequence.number = session, owner.take_number()
    sequence.request_id, sequence.group, sequence.fingerprint = request_id, group, fingerprint
    sequence.cached_tokens = sequence.computed_tokens
    owner.add(sequence)
    state.revision += 1
    return state.view(sequence)


def expire(state: State, now: float) -> Steps[None]:
    """Releases what nobody has adopted in time."""
    due = [token for token, given in state.handoffs.items() if given.expires_at <= now]
    expired = [state.handoffs.pop(token).sequence for token in due]
    state.in_flight.update(expired)
    for sequence in expired:
        yield from finish_release(state, sequence)
