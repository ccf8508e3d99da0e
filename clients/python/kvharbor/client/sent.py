"""Calls under way that can be taken in here, as they are while the service is away [C11]."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Sent(Generic[T]):
    """One of them. No I/O; its link's calls change it one at a time.

    It is taken in when the service's next process is told how things stand, for it may have taken effect in the last
    one and its answer never come. Then it is not sent again.
    """

    def __init__(self, here: Callable[[], T]) -> None:
        self._here = here
        self._outcomes: list[T] = []

    @property
    def is_taken(self) -> bool:
        """Whether it has been taken in here."""
        return bool(self._outcomes)

    @property
    def outcome(self) -> T:
        """What came of that."""
        return self._outcomes[0]

    def take_here(self) -> None:
        """Takes it in, once."""
        if not self._outcomes:
            self._outcomes.append(self._here())
