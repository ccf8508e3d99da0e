"""Releases by request_id or group."""

import dataclasses
import weakref
from typing import TypeVar

from kvharbor.client import refusals
from kvharbor.client.calls import Call, request
from kvharbor.client.errors import InvalidField
from kvharbor.client.sequence_state import SequenceState
from kvharbor.v1 import cache_service_pb2 as cache

Reply = TypeVar("Reply")


class LiveSequences:
    """A pool's sequences that somebody here still has: for a release by name, and for `held` [C11].

    Each has one object: its end is known then wherever that is used [C4]. `owed` were released while the service was
    away, and it has still to learn of commits before that.
    """

    def __init__(self) -> None:
        self._sequences: weakref.WeakValueDictionary[str, SequenceState] = weakref.WeakValueDictionary()
        self.owed: list[SequenceState] = []

    def add(self, sequence: SequenceState) -> None:
        """Knows a sequence as long as somebody else does."""
        self._sequences[sequence.id] = sequence

    def of(self, sequence_id: str) -> SequenceState | None:
        """Returns the object of a sequence that has not ended: calls that are repeated tell of one that is here."""
        sequence = self._sequences.get(sequence_id)
        return None if sequence is None or sequence.ended else sequence

    def sparing(self, call: Call[Reply]) -> Call[Reply]:
        """Returns a call whose undo ends no sequence that is here: what it repeats has told of that [C4]."""
        undo, named = call.undo, cache.ReleaseItem(request_id=call.request.request_id)  # type: ignore[attr-defined]
        return dataclasses.replace(call, undo=lambda: None if undo is None or self.named(named) else undo())

    def forget(self, sequence: SequenceState) -> None:
        """Takes in a release while the service is away."""
        if sequence.untold and not sequence.ended:
            self.owed.append(sequence)
        sequence.forget()

    def live(self) -> list[SequenceState]:
        """Returns those that have not ended."""
        # In one step, as other threads add theirs meanwhile.
        known = [sequence for reference in self._sequences.valuerefs() if (sequence := reference()) is not None]
        return [sequence for sequence in known if not sequence.ended]

    def named(self, item: cache.ReleaseItem) -> list[SequenceState]:
        """Returns those that `item` means. Ask before the call: a sequence that comes during it may outlive it."""
        field = item.WhichOneof("target")
        return [sequence for sequence in self.live() if field and getattr(sequence, field) == getattr(item, field)]


def item(request_id: str | None, group: str | None) -> cache.ReleaseItem:
    """Names what to end; exactly one of the two is given."""
    if (request_id is None) == (group is None):
        raise InvalidField.of(
            "release", (request_id, group), limit="a request_id or a group", remedy="name exactly one"
        )
    if request_id is not None:
        return request(cache.ReleaseItem, request_id=request_id)
    return request(cache.ReleaseItem, group=group)


def sequence_count(reply: cache.ReleaseResponse) -> int:
    """Returns how many sequences the one item of a release has ended, or raises its refusal."""
    (result,) = reply.results
    if result.status.code:
        raise refusals.from_item(result.status)
    return result.released_sequence_count
