"""One life of the owner's state: its name, its clock and its counters, which go on over the processes that serve it."""

import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import Self

from kvharbor.server.keeper import Keeper

_NAME = "epoch"


@dataclass(slots=True)
class Life:
    """What is kept under the name "epoch". A number is kept before it is used, so none is used twice [S15].

    `clock_offset_s` makes the service's clock out of the event loop's: a time taken from elsewhere shows at once, it
    is days off. `listen` is the TCP address as it was bound; `restarts` counts the processes before by what ended
    them.
    """

    epoch: str
    clock_offset_s: float
    memory_bytes: int
    listen: str | None = None
    restarts: dict[str, int] = field(default_factory=dict)
    stall_count: int = 0
    stalled_s: float = 0.0
    pool_count: int = 0

    @classmethod
    def begun(cls, memory_bytes: int) -> Self:
        """Returns a new life."""
        return cls(secrets.token_hex(6), 1e6 + secrets.randbelow(10**6), memory_bytes)

    @classmethod
    def kept(cls, keeper: Keeper) -> Self | None:
        """Returns the life that a process before this one has served, if there is one."""
        kept = keeper.kept.get(_NAME)
        if kept is None:
            return None
        # By a process of another version, perhaps: what that one did not know begins now, what this one does not ends.
        known = {each.name for each in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in kept.meta.items() if name in known})

    @property
    def restart_count(self) -> int:
        """Processes that have served this life before."""
        return sum(self.restarts.values())

    @property
    def first_number(self) -> int:
        """Where this process begins to count what is not kept, above whatever the ones before it came to."""
        return self.restart_count << 40 | 1

    def next_pool_number(self, keeper: Keeper) -> int:
        """Returns a number that no pool has had."""
        self.pool_count += 1
        self.keep(keeper)
        return self.pool_count

    def keep(self, keeper: Keeper) -> None:
        """Keeps it as it stands."""
        keeper.keep(_NAME, dataclasses.asdict(self))
