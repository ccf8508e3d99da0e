"""Why the pool refuses. Sorted by what the caller should do:

PoolError
├── InvalidField             caller's mistake: never retry
├── RequestTooLarge          larger than the pool can ever give
├── CursorOutOfRange         a cursor would pass the end
├── SequenceNotFound, PinNotFound, HandoffNotFound, BlockNotFound
├── CommitBackwards, StaleGeneration, BlockHeld, BlockNotHeld, RequestIdReused, SequenceBusy
│                            state says no: do not retry unchanged
├── PoolExhausted            full now: wait, or preempt a sequence
├── WarmBudgetExceeded       full of pins: unwarm one
├── TablesFull               too much held without room of its own: release sequences
└── InvariantViolation       our bug: the process must end
"""

import re
from typing import ClassVar


def _lower_camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


class PoolError(Exception):
    """A refusal. `reason` is stable; every number in the message is an attribute and in `metadata()`."""

    reason: ClassVar[str]
    template: ClassVar[str]

    def __init__(self, **attributes: object) -> None:
        self.attributes = attributes
        super().__init__(self.template.format(**attributes))

    def metadata(self) -> dict[str, str]:
        """Returns the attributes under the keys that the API documents with the reason."""
        return {_lower_camel(name): str(value) for name, value in self.attributes.items()}


class InvalidField(PoolError):
    """A field has a value that can never be right. Attributes: field, value, limit, remedy."""

    reason = "INVALID_FIELD"
    template = "{field} is {value}, must be {limit}; {remedy}"


class RequestTooLarge(PoolError):
    """More blocks than the pool has, now and for ever."""

    reason = "REQUEST_TOO_LARGE"
    template = (
        "the request needs {needed_block_count} blocks and the pool has {usable_block_count} in all: larger"
        " than the pool; shorten it or make the pool larger"
    )


class CursorOutOfRange(PoolError):
    """A cursor would pass the end of what is there."""

    reason = "CURSOR_OUT_OF_RANGE"
    template = "sequence {sequence_id}: {cursor} would be {value}, at most {limit} is possible; {remedy}"


class SequenceNotFound(PoolError):
    """The session never had this sequence."""

    reason = "SEQUENCE_NOT_FOUND"
    template = "sequence {sequence_id} is not one of this session; allocate or adopt one"


class PinNotFound(PoolError):
    """The tenant has no warm pin of this name."""

    reason = "PIN_NOT_FOUND"
    template = "no warm pin is named {name!r}; it may have expired"


class HandoffNotFound(PoolError):
    """The token is unknown, used, expired or another tenant's."""

    reason = "HANDOFF_NOT_FOUND"
    template = "the hand-off token is unknown, used or expired; compute the sequence again"


class BlockNotFound(PoolError):
    """The block does not hold that content."""

    reason = "BLOCK_NOT_FOUND"
    template = "block {block_id} of generation {generation} is not committed; it was evicted or never was"


class CommitBackwards(PoolError):
    """`computed_tokens` went down."""

    reason = "COMMIT_BACKWARDS"
    template = (
        "sequence {sequence_id} has {computed_tokens} computed tokens, {requested_tokens} would take back what"
        " others may already read; commit forwards only"
    )


class StaleGeneration(PoolError):
    """The caller's idea of a block in its table is wrong."""

    reason = "STALE_GENERATION"
    template = (
        "sequence {sequence_id} has block {current_block_id} of generation {current_generation} at position"
        " {position} (0 of 0: none of its own), not block {block_id} of generation {generation}; fetch the table again"
    )


class BlockHeld(PoolError):
    """The block or a descendant is in use."""

    reason = "BLOCK_HELD"
    template = "block {block_id} cannot go: {held_block_count} blocks at or below it are held; release them first"


class BlockNotHeld(PoolError):
    """The session does not hold the block by itself, or not in the state that the call needs."""

    reason = "BLOCK_NOT_HELD"
    template = "block {block_id} of generation {generation} is not held by this session as it has to be: {remedy}"


class RequestIdReused(PoolError):
    """The request_id names a live sequence that was asked for with other arguments."""

    reason = "REQUEST_ID_REUSED"
    template = "request_id {request_id!r} is in use with another {differs}; release it or choose a fresh one"


class SequenceBusy(PoolError):
    """A copy from or into the sequence is under way."""

    reason = "SEQUENCE_BUSY"
    template = "sequence {sequence_id} takes part in a copy; await the Fork before the next call"


class PoolExhausted(PoolError):
    """Does not fit now; another time it may."""

    reason = "POOL_EXHAUSTED"
    template = (
        "{needed_block_count} blocks are needed and {available_block_count} available of"
        " {usable_block_count} ({free_block_count} free, {cached_block_count} cached; held: {reserved_block_count}"
        " reserved, {active_block_count} active, {warm_block_count} warm, {quarantined_block_count}"
        " quarantined); wait, or preempt a sequence"
    )


class WarmBudgetExceeded(PoolError):
    """The pin would exceed what pins may hold."""

    reason = "WARM_BUDGET_EXCEEDED"
    template = (
        "the pin needs {needed_block_count} more blocks, {warm_block_count} of {budget_block_count} that pins may"
        " hold are taken; unwarm one or raise warm_budget_ratio"
    )


class TablesFull(PoolError):
    """The session's sequences would have more in their tables than one session may, shared blocks or not."""

    reason = "TABLES_FULL"
    template = (
        "{needed_entry_count} more entries are needed in the block tables of the session's sequences and"
        " {held_entry_count} of {budget_entry_count} are taken, those of shared blocks too; release sequences"
    )


class InvariantViolation(PoolError):
    """A rule of docs/invariants.md does not hold: a bug of kvharbor. Attributes: rule, detail."""

    reason = "INVARIANT_VIOLATION"
    template = "[{rule}] {detail}"
