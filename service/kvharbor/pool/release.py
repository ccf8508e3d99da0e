"""How sequences end: by Release, with their session, or because they never came to be.

Blocks go tail first, so that the deepest becomes the first candidate for eviction and no cached block ever has
a held descendant.
"""

from collections.abc import Iterable

from kvharbor.pool import pins
from kvharbor.pool.blocks import QUARANTINED, SHADOW
from kvharbor.pool.errors import SequenceNotFound
from kvharbor.pool.events import PinEnded
from kvharbor.pool.sequence import Pin, Sequence, Session
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps

SEQUENCES_A_SLICE = 128


def release(state: State, session: int, number: int) -> Steps[int]:
    """Ends one sequence; 0 if it had ended already."""
    owner = state.session(session)
    sequence = owner.sequences.get(number)
    if sequence is None:
        if 1 <= number < owner.next_number:
            return 0
        raise SequenceNotFound(sequence_id=f"{session}.{number}")
    return (yield from _release_all(state, owner, (sequence,)))


def release_request(state: State, session: int, request_id: str) -> Steps[int]:
    """Ends the session's sequence of this request_id; 0 if there is none."""
    owner = state.session(session)
    sequence = owner.by_request.get(request_id)
    return (yield from _release_all(state, owner, () if sequence is None else (sequence,)))


def release_group(state: State, session: int, group: str) -> Steps[int]:
    """Ends all of the session's sequences in this group; returns how many."""
    owner = state.session(session)
    members = [owner.sequences[number] for number in sorted(owner.by_group.get(group, ()))]
    return (yield from _release_all(state, owner, members))


def _release_all(state: State, owner: Session, sequences: Iterable[Sequence]) -> Steps[int]:
    chosen = list(sequences)
    for sequence in chosen:
        state.refuse_if_copying(sequence)
    yield from release_each(state, owner, chosen)
    return len(chosen)


def release_each(state: State, owner: Session, sequences: list[Sequence]) -> Steps[None]:
    """Ends sequences of a session, none of which is being copied."""
    for index, sequence in enumerate(sequences, start=1):
        detach(state, owner, sequence)
        yield from finish_release(state, sequence)
        # Short ones end without a pause of their own; each costs about as much as a few blocks.
        if not index % SEQUENCES_A_SLICE and index < len(sequences):
            yield


def detach(state: State, owner: Session, sequence: Sequence) -> None:
    """Takes a sequence from its session: its handle has ended, its blocks are still to be given back."""
    owner.remove(sequence)
    state.in_flight.add(sequence)


def finish_release(state: State, sequence: Sequence) -> Steps[None]:
    """Gives back the blocks of a sequence that is in `in_flight`; cannot fail."""
    if sequence.tell_end is not None:
        sequence.tell_end(sequence.token_count)
    state.writers.remove(sequence)
    end_promise(state, sequence)
    state.tenant(sequence.namespace.tenant).sequence_count -= 1
    while len(sequence.table) > state.slice_blocks:
        give_back(state, sequence, len(sequence.table) - state.slice_blocks)
        yield
    take_down(state, sequence)


def take_down(state: State, sequence: Sequence) -> None:
    """Gives back all that is left of a sequence in `in_flight`, at once."""
    give_back(state, sequence, 0)
    state.in_flight.discard(sequence)
    state.namespaces.disuse(sequence.namespace)


def give_back(state: State, sequence: Sequence, keep: int) -> None:
    """Cuts the table down to `keep` blocks."""
    blocks = state.blocks
    committed = sequence.committed_blocks
    private = sequence.table[max(keep, committed) :]
    published = sequence.table[keep:committed]
    published.reverse()
    del sequence.table[keep:]
    sequence.committed_blocks = min(committed, keep)
    if private:
        if blocks.state[private[0]] == QUARANTINED:
            blocks.free_quarantined(private)
        else:
            blocks.free_reserved(private)
    if blocks.canonical and not blocks.canonical.keys().isdisjoint(published):
        published = [_canonical(state, block) for block in published]
    state.unhold(published, sequence.namespace)
    if private or published:
        state.revision += 1


def drop_private(state: State, sequence: Sequence) -> Steps[None]:
    """QUARANTINED -> FREE for what is private in a sequence of a lost session; what is committed stays held."""
    end_promise(state, sequence)
    committed_tokens = sequence.committed_blocks * state.block_tokens
    sequence.token_count = sequence.computed_tokens = committed_tokens
    sequence.cached_tokens = min(sequence.cached_tokens, committed_tokens)
    sequence.tail.clear()
    sequence.extras.clear()
    table, blocks = sequence.table, state.blocks
    while len(table) > sequence.committed_blocks:
        keep = max(sequence.committed_blocks, len(table) - state.slice_blocks)
        part = table[keep:]
        del table[keep:]
        state.sessions[sequence.session].entry_count -= len(part)
        blocks.free_quarantined(part)
        state.revision += 1
        yield
    for position, block in enumerate(table if blocks.canonical else ()):
        if block in blocks.canonical:
            table[position] = _canonical(state, block)
            state.revision += 1


def _canonical(state: State, block: int) -> int:
    """Ends a shadow and returns the committed block whose hold is the sequence's to give back."""
    blocks = state.blocks
    if blocks.state[block] == SHADOW:
        return blocks.unshadow(block)
    if blocks.state[block] == QUARANTINED:
        return blocks.free_quarantined((block,))[0]
    return block


def end_promise(state: State, sequence: Sequence) -> None:
    """Cuts a sequence from the warm pin it was to fill; what it has not committed is promised no more."""
    pin = sequence.pin
    if pin is not None:
        state.promised -= pin.promised
        pin.promised = 0
        pin.sequence = sequence.pin = None
        # Sessions that have not resumed yet may have the sequence that fills it.
        if not pin.blocks and state.recovery is None:
            end_pin(state, pin)


def end_pin(state: State, pin: Pin) -> None:
    """Ends a pin that holds nothing and that nobody fills."""
    del state.pins[pin.tenant, pin.name]
    pins.erase(state, pin)
    announce_end(state, pin, expired=False)


def announce_end(state: State, pin: Pin, *, expired: bool) -> None:
    """Announces the end of a pin that holds nothing any more."""
    state.namespaces.disuse(pin.namespace)
    state.revision += 1
    state.events.append(PinEnded(state.revision, pin.tenant, pin.name, expired))
