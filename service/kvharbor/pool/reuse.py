"""How soon blocks are asked for again, by how often they were used before, and what keeping one is worth by that."""

from itertools import takewhile
from typing import Final

AGES: Final = 40
"""Ages are octaves: [1, 2), [2, 4), ... published blocks."""
_SAMPLE_COUNT: Final = 4096
"""Contents whose reuse is followed at a time, about."""
MOST_FOLLOWED: Final = 4 * _SAMPLE_COUNT
"""At most: callers choose their contents, and could choose only such as are in the sample."""
_MEMORY: Final = 8
"""A content is followed until as many times the pool's blocks were published after its release."""
_HORIZON: Final = 4
"""Hits further away than as many times the pool's blocks earn nothing: before, everything else has its turn."""
_RENEWALS: Final = 4
"""The ranking is made anew so often while a pool's blocks are published once."""
_FADING: Final = 0.98
"""What was seen before counts so much less at each renewal: traffic changes."""
_PRIOR: Final = 32.0
"""A kind of a further class counts for like that of the first class in so many of its releases."""
_UNSEEN: Final = 1.0
"""A block of each kind that is never asked for again is taken for seen, so that a kind without any has a rank."""


def age_of(published_count: int) -> int:
    """Returns the age of what was released so many published blocks ago."""
    return max(published_count, 1).bit_length() - 1


class ReuseTimes:
    """Follows a sample of contents, cached or evicted, from each release to the next use. Bounded memory.

    `density[kind][age]`: hits to come of a block of this kind and age, over the time until each of them, or until the
    horizon. Higher is better to keep. All zeros at first. The sample is those contents whose 32-bit hash has none of
    the bits of `sample_mask`. Kinds come in classes of `kind_count`: those of a further class are taken to be like
    those of the first until there is experience with them.
    """

    def __init__(self, block_count: int, kind_count: int) -> None:
        self._kind_count = kind_count
        self.density = [[0.0] * AGES for _ in range(kind_count)]
        self.sample_mask = (1 << max(_MEMORY * block_count // _SAMPLE_COUNT, 1).bit_length() - 1) - 1
        self._memory = _MEMORY * block_count
        self._horizon_age = age_of(_HORIZON * block_count)
        self._period = max(block_count // _RENEWALS, 64)
        self._renewed_at = 0
        # Kind and time of the last release, by content, in order of that time.
        self._followed: dict[int, tuple[int, int]] = {}
        self._hits = [[0.0] * AGES for _ in range(kind_count)]
        self._releases = [0.0] * kind_count

    def add_class(self) -> None:
        """Adds a class of kinds."""
        self.density += [densities.copy() for densities in self.density[: self._kind_count]]
        self._hits += [[0.0] * AGES for _ in range(self._kind_count)]
        self._releases += [0.0] * self._kind_count

    def released(self, content: int, kind: int, now: int) -> None:
        """A content of the sample has no holder any more."""
        self._followed.pop(content, None)
        if len(self._followed) < MOST_FOLLOWED:
            self._followed[content] = kind, now
            self._releases[kind] += 1

    def reused(self, content: int, now: int) -> None:
        """A content of the sample is asked for, cached or not."""
        release = self._followed.pop(content, None)
        if release is not None:
            kind, released_at = release
            self._hits[kind][age_of(now - released_at)] += 1

    def advance(self, now: int) -> None:
        """Renews the ranking when it is time to."""
        if now - self._renewed_at >= self._period:
            self._renewed_at = now
            self._forget(now - self._memory)
            for kind, releases in enumerate(self._releases):
                hits, first = self._hits[kind], kind % self._kind_count
                if kind >= self._kind_count and self._releases[first]:
                    share = min(_PRIOR / self._releases[first], 1.0)
                    hits = [own + share * other for own, other in zip(hits, self._hits[first], strict=True)]
                    releases += share * self._releases[first]
                if any(hits):  # else it stays at zeros
                    self.density[kind] = self._densities(hits, releases)
            self._hits = [[count * _FADING for count in hits] if any(hits) else hits for hits in self._hits]
            self._releases = [count * _FADING for count in self._releases]

    def _forget(self, before: int) -> None:
        # In one pass: a dictionary keeps the places of what is gone, and each new look at its front crosses them.
        followed = self._followed
        for content in list(takewhile(lambda content: followed[content][1] < before, followed)):
            del followed[content]

    def _densities(self, hits: list[float], release_count: float) -> list[float]:
        left = release_count + _UNSEEN
        unused = [left]
        for count in hits:
            left = max(left - count, 1e-9)
            unused.append(left)
        densities = [0.0] * AGES
        later_hits = later_time = 0.0
        for age in reversed(range(AGES)):
            if age >= self._horizon_age:
                later_hits = later_time = 0.0
            later_hits += hits[age]
            later_time += (1 << age) * (unused[age] + unused[age + 1]) / 2
            densities[age] = later_hits / later_time
        return densities
