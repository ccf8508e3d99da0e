"""Who waits for a block that another session computes. Sans-IO: the shell sleeps, and is told when to look again.

A waiter holds nothing ([W4]): it is a place in its prompt, and the key of the block that it lacks there.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class Outlook(enum.Enum):
    """What a waiter finds when it looks again: PENDING, go on waiting; else it allocates.

    ARRIVED: what it waited for is committed. ABANDONED: it is not, and nobody else is computing it any more.
    """

    PENDING = enum.auto()
    ARRIVED = enum.auto()
    ABANDONED = enum.auto()


@dataclass(slots=True, eq=False)
class Awaited:
    """An Allocate that waits for the block of `key`, behind the `depth` blocks of its prompt that are committed.

    `node` is the last of these, or the namespace's root, as of its `generation`. Its writer counts as stalled at
    `stalls_at`, by the caller's clock, unless it has got on by then. `moved`: it is time to look again.
    """

    session: int
    token_ids: bytes
    extras: Mapping[int, bytes]
    reusable_blocks: int
    depth: int
    node: int
    generation: int
    key: bytes
    stalls_at: float
    moved: bool = False


class Awaiting:
    """Those who wait, by key and in order of arrival, and those of them who should look again."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, dict[Awaited, None]] = {}
        self._moved: list[Awaited] = []

    def add(self, awaited: Awaited) -> None:
        """Waits for `awaited.key`."""
        awaited.moved = False
        self.by_key.setdefault(awaited.key, {})[awaited] = None

    def discard(self, awaited: Awaited) -> None:
        """Waits no more; repeating it is nothing."""
        waiting = self.by_key.get(awaited.key)
        if waiting is not None:
            waiting.pop(awaited, None)
            if not waiting:
                del self.by_key[awaited.key]

    def move(self, keys: Iterable[bytes]) -> None:
        """The blocks of these keys are published, or a writer of them is gone: their waiters look again."""
        for key in keys:
            for awaited in self.by_key.pop(key, ()):
                awaited.moved = True
                self._moved.append(awaited)

    def drain(self) -> list[Awaited]:
        """Returns those that have been moved since the last call, in order of arrival at each key."""
        moved, self._moved = self._moved, []
        return moved
