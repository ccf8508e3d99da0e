"""What was evicted lately, by whom and when: so that a miss can be told from what was never there."""

from collections.abc import Iterable
from typing import NamedTuple

ADMINISTRATOR = 0
"""Stands for a session where an administrator has evicted: sessions have numbers from 1 on."""


class Eviction(NamedTuple):
    """Blocks given up in one step: when, by the shell's clock, and for whom. An administrator has no tenant."""

    at: float
    session: int
    tenant: str


class EvictedContents:
    """The evictions of the last contents by digest, at least the last `most` and at most twice as many.

    About 140 bytes each. Digests chain from the tenant's name on, so whoever asks with the digest of his own prompt
    learns of his own tenant's contents only ([G8]).
    """

    def __init__(self, most: int) -> None:
        self.complete_since = 0.0
        """Every eviction after this time is remembered."""
        self._most = most
        self._younger: dict[bytes, Eviction] = {}
        self._older: dict[bytes, Eviction] = {}
        self._younger_since = 0.0

    def begin(self, now: float) -> None:
        """Says when the first eviction can have been."""
        self.complete_since = self._younger_since = now

    def remember(self, digests: Iterable[bytes], eviction: Eviction) -> None:
        """Takes in contents that have just left the index. O(1) a block: the older half goes at once."""
        younger = self._younger
        for digest in digests:
            younger[digest] = eviction
        if len(younger) >= self._most:
            self._older, self._younger = younger, {}
            self.complete_since, self._younger_since = self._younger_since, eviction.at

    def of(self, digest: bytes) -> Eviction | None:
        """Returns the last eviction of a content that is not in the index; None if it is not remembered."""
        return self._younger.get(digest) or self._older.get(digest)
