"""Which commit is a repetition of one whose reply was lost ([G4])."""

from kvharbor.pool import validate
from kvharbor.pool.errors import CursorOutOfRange
from kvharbor.pool.results import Commit
from kvharbor.pool.sequence import Sequence
from kvharbor.pool.state import State


def has_taken_effect(state: State, sequence: Sequence, asked: Commit) -> bool:
    """Whether a commit is a repetition, by the token count that its caller knew: it shall change nothing then."""
    known, now = asked.known_token_count, sequence.token_count
    assert known is not None
    new_count = validate.token_count(asked.new_token_ids, "new_token_ids")
    if (
        0 <= known == now - new_count
        and asked.computed_tokens <= sequence.computed_tokens
        and _tokens_from(state, sequence, known) == asked.new_token_ids
    ):
        # With nothing new, less than is computed is no repetition but a step back.
        return new_count > 0 or asked.computed_tokens == sequence.computed_tokens
    if known != now:
        raise CursorOutOfRange(
            sequence_id=sequence.name(),
            value=known,
            limit=now,
            cursor="known_token_count",
            remedy="a commit follows the one before, or repeats it",
        )
    return False


def _tokens_from(state: State, sequence: Sequence, first_token: int) -> bytes:
    """Returns the tokens of a sequence from one on, wherever they are kept."""
    block_tokens, committed = state.block_tokens, sequence.committed_blocks
    first = min(first_token // block_tokens, committed)
    published = [state.blocks.canonical.get(block, block) for block in sequence.table[first:committed]]
    tokens = b"".join([state.tree.content_of(block)[: 4 * block_tokens] for block in published])
    return (tokens + sequence.tail)[4 * (first_token - first * block_tokens) :]
