"""What a commit is refused with by the cursors and the room that are known here."""

from typing import TYPE_CHECKING

from kvharbor.client.errors import CommitBackwards, CursorOutOfRange, HarborError
from kvharbor.client.extra_keys import keys_refusal
from kvharbor.v1 import cache_service_pb2 as cache

if TYPE_CHECKING:
    from kvharbor.client.sequence_state import SequenceState


def refusal(sequence: "SequenceState", item: cache.CommitItem) -> HarborError | None:
    """Returns what the service would refuse a commit with for which there is room, as the sequence is here."""
    if item.known_token_count != sequence.token_count:  # behind one that was refused
        remedy = "a commit follows the one before, or repeats it"
        return _out_of_range(sequence, "known_token_count", item.known_token_count, sequence.token_count, remedy)
    token_count = sequence.token_count_with(item)
    if not 0 <= item.computed_tokens <= token_count:
        remedy = "only known tokens can be computed: send new_token_ids with the commit"
        return _out_of_range(sequence, "computed_tokens", item.computed_tokens, token_count, remedy)
    if item.computed_tokens < sequence.computed_tokens:
        return CommitBackwards(
            f"sequence {sequence.id} has {sequence.computed_tokens} computed tokens, {item.computed_tokens} would take "
            f"back what others may already read; commit forwards only",
            metadata={
                "sequenceId": sequence.id,
                "computedTokens": str(sequence.computed_tokens),
                "requestedTokens": str(item.computed_tokens),
            },
        )
    tokens = (sequence.token_count, token_count)
    return keys_refusal(item.extra_keys, sequence.tail.extra_keys, tokens, sequence.block_tokens)


def room_refusal(sequence: "SequenceState", item: cache.CommitItem) -> CursorOutOfRange | None:
    """Returns what a commit of more tokens than the table has room for is refused with, before anything is sent [C5].

    After an extend without an answer the service may have room for them, and would take them. But its next process has
    the table that it is told, and takes up no sequence that is longer [L12].
    """
    token_count = sequence.token_count_with(item)
    if token_count <= sequence.capacity_tokens:
        return None
    return _out_of_range(sequence, "token_count", token_count, sequence.capacity_tokens, "extend the sequence first")


def _out_of_range(sequence: "SequenceState", cursor: str, value: int, limit: int, remedy: str) -> CursorOutOfRange:
    return CursorOutOfRange(
        f"sequence {sequence.id}: {cursor} would be {value}, at most {limit} is possible; {remedy}",
        metadata={
            "sequenceId": sequence.id,
            "cursor": cursor,
            "value": str(value),
            "limit": str(limit),
            "remedy": remedy,
        },
    )
