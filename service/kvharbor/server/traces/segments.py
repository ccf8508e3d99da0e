"""Prompts as segments of text that recur, cut into blocks."""

from collections.abc import Iterable, Iterator

Piece = tuple[int, int, int]
"""Where in a segment a part of a block lies: the segment, its first token, tokens."""


def whole_blocks(segments: Iterable[tuple[int, int]], block_tokens: int) -> Iterator[tuple[Piece, ...]]:
    """Yields the pieces of each whole block of a prompt of (segment, tokens): equal ones for equal tokens only."""
    pieces: list[Piece] = []
    room = block_tokens
    for segment, token_count in segments:
        first = 0
        while first < token_count:
            taken = min(room, token_count - first)
            pieces.append((segment, first, taken))
            first += taken
            room -= taken
            if not room:
                yield tuple(pieces)
                pieces, room = [], block_tokens
