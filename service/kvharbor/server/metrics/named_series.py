"""Bounds the number of time series: the largest have a name, the rest are told together."""

import heapq
from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

OTHER: Final = "other"
"""The label of those that have no series of their own."""


class NamedSeries(Generic[K]):
    """Chooses at most `limit` of many keys. A key keeps its name while it exists, so that its counters never fall.

    `other` is the key that the rest goes under: a real one that happens to be the same is never named.
    """

    def __init__(self, limit: int, other: K) -> None:
        self._limit = limit
        self._other = other
        self._named: set[K] = set()

    def choose(self, sizes: Mapping[K, int]) -> frozenset[K]:
        """Returns the keys with a name: those that had one, then the largest."""
        self._named &= sizes.keys()
        room = self._limit - len(self._named)
        if room > 0:
            others = (key for key in sizes if key not in self._named and key != self._other)
            self._named.update(heapq.nlargest(room, others, key=sizes.__getitem__))
        return frozenset(self._named)
