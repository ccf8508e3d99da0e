"""What the caller of a request knows and the pool cannot see: hints, and the classes that eviction tells apart by them.

Nobody is taken at his word [H1]. Blocks of a class are ranked by what the blocks of this class have earned, as soon as
there is experience with it, and until then as if they had no hints.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import log
from typing import Final

CLASSES: Final = 15
"""A pool tells so many classes apart, those that come first; others count as without hints."""
CLASSES_A_TENANT: Final = 4
"""So many of them may be of one tenant."""


class ExpectedReuse(IntEnum):
    """How often others will ask for what a request leaves behind, in its caller's opinion."""

    UNKNOWN = 0
    NONE = 1
    SOME = 2
    MUCH = 3


@dataclass(frozen=True, slots=True)
class Hints:
    """About the blocks that a request publishes. `retention_s` is how long they will be of use; 0 is unknown."""

    priority: int = 0
    retention_s: float = 0.0
    expected_reuse: ExpectedReuse = ExpectedReuse.UNKNOWN


NO_HINTS: Final = Hints()


class HintClasses:
    """Numbers the classes, each of one tenant: what others do with their hints says nothing about one's own."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int, int, ExpectedReuse], int] = {}
        self._counts: dict[str, int] = {}

    def number(self, tenant: str, hints: Hints) -> int:
        """Returns the class of a request; 0 is that of all without hints. Times of the same power of 4 are alike."""
        if hints is NO_HINTS or hints == NO_HINTS:
            return 0
        retention = 1 + int(log(max(hints.retention_s, 1.0), 4)) if hints.retention_s else 0
        key = (tenant, hints.priority, retention, hints.expected_reuse)
        number = self._numbers.get(key)
        if number is None:
            count = self._counts.get(tenant, 0)
            if count == CLASSES_A_TENANT or len(self._numbers) == CLASSES:
                return 0
            self._counts[tenant] = count + 1
            number = self._numbers[key] = len(self._numbers) + 1
        return number
