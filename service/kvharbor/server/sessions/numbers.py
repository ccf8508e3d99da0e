"""Numbers of sessions: none is given out twice in an epoch, whatever becomes of the process that gave it."""

from collections.abc import Container
from typing import Final

from kvharbor.server.supervision.keeper import Keeper

MAX_NUMBER: Final = (1 << 24) - 1
"""The ledger has so much room for one. After it they begin anew, past those in use."""

_NAME: Final = "sessions"
_BATCH: Final = 256


class SessionNumbers:
    """Gives out numbers from 1 on. A batch is kept before any of it is used; a later process skips the rest [S15]."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        kept = keeper.kept.get(_NAME)
        self._next = 1 if kept is None else int(kept.meta["next_number"])
        self._reserved_count = 0

    def take(self, used: Container[int]) -> int:
        """Returns a number that is not among `used`."""
        number = self._step()
        while number in used:
            number = self._step()
        return number

    def _step(self) -> int:
        if not self._reserved_count:
            self._reserved_count = _BATCH
            self._keeper.keep(_NAME, {"next_number": (self._next + _BATCH - 1) % MAX_NUMBER + 1})
        self._reserved_count -= 1
        number = self._next
        self._next = number % MAX_NUMBER + 1
        return number
