"""How often contents were used that are not cached any more, roughly and in little memory."""

from array import array
from collections.abc import Iterable
from typing import Final

MAX_USES: Final = 8
"""Counts end here: a content that was used as often is as good as one that was used more."""
_SPAN: Final = 4
"""A content is remembered until as many times the pool's blocks were published after it, at least."""
_COUNT_BITS: Final = 4
_MOST: Final = (1 << _COUNT_BITS) - 1
_MARK_SHIFT: Final = 16
_MARK: Final = 0xFFFF & ~_MOST


class UseCounts:
    """A table by hash in two halves, the older one of which is dropped now and then; 16 bytes a block.

    An entry is the leading bits of a hash and a count. Contents with the same place push each other out, and one in a
    thousand or more that share one is taken for the other: a policy that is told so errs in its order, in nothing else.
    """

    def __init__(self, block_count: int) -> None:
        place_count = 1 << (_SPAN * block_count - 1).bit_length()
        self._mask = place_count - 1
        self._span = _SPAN * block_count
        self._younger = array("H", bytes(2 * place_count))
        self._older = array("H", bytes(2 * place_count))
        self._age = 0

    def of(self, contents: Iterable[int]) -> list[int]:
        """Returns how often contents, by their 32-bit hashes, had been used when last remembered; 0 if unknown."""
        mask, younger, older = self._mask, self._younger, self._older
        found = []
        for content in contents:
            place, mark = content & mask, content >> _MARK_SHIFT & _MARK
            count = younger[place] - mark
            if not 0 < count <= _MOST:
                count = older[place] - mark
                if not 0 < count <= _MOST:
                    count = 0
            found.append(count)
        return found

    def remember(self, contents: Iterable[int], uses: Iterable[int]) -> None:
        """Keeps the uses, at most MAX_USES, of contents that are cached no more."""
        mask, younger = self._mask, self._younger
        for content, count in zip(contents, uses, strict=True):
            younger[content & mask] = content >> _MARK_SHIFT & _MARK | count

    def advance(self, published_count: int) -> None:
        """Lets the time of so many published blocks pass."""
        self._age += published_count
        if self._age >= self._span:
            self._age = 0
            self._older = self._younger
            self._younger = array("H", bytes(2 * len(self._older)))
