"""Whether memory that a start lacks may come: workers of an earlier epoch let go of theirs when they hear of this."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from kvharbor.gpumem import InsufficientMemory

NEWS_S: Final = 2.0
"""Within which a worker that has lost its service finds the next one: it looks once a second."""
LETTING_GO_S: Final = 120.0
"""Within which workers end what they do on the old memory, and let go of it."""


@dataclass(frozen=True, slots=True)
class EarlierEpoch:
    """What this process knows of the epochs before its own.

    `arena` is the kind of the pools' memory; `after` is what ended the epoch before, empty if nothing is known to
    have; `stale_pids` grows with the processes that ask to go on in another epoch.
    """

    arena: str
    after: str
    stale_pids: Collection[int]

    def patience_s(self, refused: InsufficientMemory) -> float:
        """Returns how long the memory is worth waiting for.

        The host shows who maps what of an earlier epoch. A device does not: there it is who has come back, or might.
        """
        if "heldBy" in refused.metadata() or (self.arena != "host" and (self.after or self.stale_pids)):
            return LETTING_GO_S
        return 0.0 if self.arena == "host" else NEWS_S

    def holders(self, refused: InsufficientMemory) -> dict[str, object]:
        """Returns who may have the memory, as facts for the log."""
        if "heldBy" in refused.metadata():
            return {"held_bytes": refused.held_bytes, "held_by": refused.held_by}
        return {"told_to_let_go": ", ".join(map(str, sorted(self.stale_pids)[:20]))}
