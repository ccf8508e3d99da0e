"""Which cached block goes first.

A policy holds exactly the evictable blocks: committed, no refs, no pins, no held descendant. It must hand out
a block only after all its cached children, so that no chain loses its middle ([P2]).
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol


class EvictionPolicy(Protocol):
    """The order in which evictable blocks are given up. Every method is O(1) a block, amortised."""

    def publish_many(self, blocks: Sequence[int], digests: Sequence[bytes], hint_class: int = 0) -> None:
        """Is told of blocks that are committed and held now, of the names of what they hold, and of their class."""

    def insert_many(self, blocks: Iterable[int]) -> None:
        """Takes blocks whose last hold has just gone, in order: children before parents."""

    def revive_many(self, blocks: Iterable[int]) -> None:
        """Forgets blocks that are held again."""

    def remove_many(self, blocks: Iterable[int]) -> None:
        """Forgets blocks that are to be freed by somebody's choice, none of which has a child that is not."""

    def pop_many(self, block_count: int) -> list[int]:
        """Removes and returns the blocks to evict next, children before parents.

        The caller has checked that so many are there, and takes them out of the tree at once. They may be fewer, even
        none, where it takes long to find them: a later call goes on from there.
        """
        ...

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...

    def __iter__(self) -> Iterator[int]:
        """Yields every evictable block, in no promised order."""
        ...


class LeastRecentlyReleased:
    """Evicts in order of release; sequences release their deepest block first, so tails go before heads.

    A parent is released after its children whenever both are: whoever holds a block holds its whole chain. So
    the order of insertion never puts a parent before a cached child.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert_many(self, blocks: Iterable[int]) -> None:
        order = self._order
        for block in blocks:
            order[block] = None

    def publish_many(self, blocks: Sequence[int], digests: Sequence[bytes], hint_class: int = 0) -> None:
        """Nothing of them matters here."""

    def revive_many(self, blocks: Iterable[int]) -> None:
        self.remove_many(blocks)

    def remove_many(self, blocks: Iterable[int]) -> None:
        order = self._order
        for block in blocks:
            del order[block]

    def pop_many(self, block_count: int) -> list[int]:
        victims = list(islice(self._order, block_count))
        self.remove_many(victims)
        return victims

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def __iter__(self) -> Iterator[int]:
        """Yields them in the order of eviction."""
        return iter(self._order)
