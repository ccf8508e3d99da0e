"""When who died and when that was over: what the harness and the observer have noted, and the figures of it."""

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Outage:
    """A time without an answer, from the first death of the service's process to the first answer after it.

    `up_s`: how long there had been answers before. `last_death`: the process may have died again before it
    answered. `cold`: the answer is of a new epoch.
    """

    up_s: float

    first_death: float
    last_death: float
    over: float
    cold: bool


@dataclass(slots=True)
class Times:
    """Monotonic times in order. `gone`: when the session of a process had given back everything."""

    owner_deaths: list[float] = field(default_factory=list)
    supervisor_deaths: int = 0
    standby_deaths: list[float] = field(default_factory=list)
    upgrades: int = 0
    owner_stops: list[tuple[float, float]] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    epochs: list[str] = field(default_factory=list)
    gone: dict[int, list[float]] = field(default_factory=dict)

    def returned(self, at: float, epoch: str) -> None:
        """Notes an answer after a time without."""
        self.returns.append(at)
        self.epochs.append(epoch)

    def vanished(self, pids: Iterable[int], at: float) -> None:
        """Notes the end of a session with these processes."""
        for pid in pids:
            self.gone.setdefault(pid, []).append(at)

    def serves(self) -> bool:
        """Whether the service has answered since its last death."""
        return bool(self.returns) and (not self.owner_deaths or self.returns[-1] > self.owner_deaths[-1])

    def warm_kill_count(self) -> int:
        """Returns how often the child has died before its time, and its supervisor had not."""
        return len(self.owner_deaths) - self.supervisor_deaths - self.upgrades

    def had_standby(self, outage: Outage, made_after_s: float) -> bool:
        """Whether there was a process that waited to take over, which is made so long after each return."""
        began = outage.first_death - outage.up_s
        return outage.up_s >= made_after_s and not any(began <= at for at in self.standby_deaths if at <= outage.over)

    def outages(self) -> list[Outage]:
        """Returns all of them that are over."""
        deaths_by_return: dict[int, list[float]] = {}
        for died in self.owner_deaths:
            deaths_by_return.setdefault(bisect.bisect(self.returns, died), []).append(died)
        return [
            Outage(
                deaths[0] - self.returns[place - 1],
                deaths[0],
                deaths[-1],
                self.returns[place],
                self.epochs[place] != self.epochs[place - 1],
            )
            for place, deaths in deaths_by_return.items()
            if 0 < place < len(self.returns)
        ]

    def reclaims(self, deaths: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
        """Returns how long it took from each (pid, time) of a worker's death to the return of its memory.

        First those with a service all the while, then the others, that had to wait for its own return too: it had
        died or was stopped.
        """
        pauses = [(outage.first_death, outage.over) for outage in self.outages()] + self.owner_stops
        undisturbed: list[float] = []
        disturbed: list[float] = []
        for pid, died in deaths:
            over = min((at for at in self.gone.get(pid, ()) if at >= died), default=None)
            if over is not None:
                during = any(begin <= over and died <= end for begin, end in pauses)
                (disturbed if during else undisturbed).append(over - died)
        return undisturbed, disturbed


def quantile(values: Sequence[float], share: float) -> float | None:
    """Returns the smallest value that so large a share of them does not exceed; None of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
