"""What is killed, how and when: a function of the seed and the wanted numbers alone, so that a run can be repeated."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Means(Enum):
    """How a process is struck."""

    KILL = "kill"
    TERM = "term"
    STOP = "stop"  # and continued
    STOP_AND_KILL = "stop_and_kill"
    BUSY_KILL = "busy_kill"  # by itself, in the midst of calls
    BUSY_STOP = "busy_stop"
    BUSY_STOP_AND_KILL = "busy_stop_and_kill"
    MARK = "mark"  # it kills itself at a marked point
    QUIET_KILL = "quiet_kill"  # while no call is under way, with the index compared before and after
    UPGRADE = "upgrade"  # replaced on purpose
    STANDBY_KILL = "standby_kill"  # not it, but the one that waits to take over


class Target(Enum):
    """Who is struck."""

    WORKER = "worker"
    OWNER = "owner"
    SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    worker_kills: int
    owner_kills: int
    supervisor_kills: int
    workers: int = 6
    mean_pause_s: float = 0.15


@dataclass(frozen=True, slots=True)
class Strike:
    """One blow, `after_s` after the one before.

    The owner is struck when it has been back from the last one for `rest_s`; None: whether it is back or not.
    """

    after_s: float
    target: Target
    means: Means
    slot: int
    stop_s: float
    mark: str
    passes: int
    rest_s: float | None


_MEANS = {
    Target.WORKER: (
        (Means.KILL, 10),
        (Means.BUSY_KILL, 6),
        (Means.TERM, 3),
        (Means.STOP_AND_KILL, 2),
        (Means.BUSY_STOP_AND_KILL, 2),
    ),
    Target.OWNER: ((Means.KILL, 6), (Means.MARK, 10), (Means.STOP_AND_KILL, 1), (Means.QUIET_KILL, 3)),
    Target.SUPERVISOR: ((Means.KILL, 3), (Means.TERM, 1)),
}
# What is no kill comes on top.
_STOPS_A_KILL = 0.1
_UPGRADES_A_KILL = 0.05
_STANDBY_KILLS_A_KILL = 0.05
_MOST_PASSES = 6
_STOPS_S = (0.05, 0.3, 1.0)
LONGEST_STOP_S = max(_STOPS_S)
STANDBY_S = 2.5
"""After so long the process that would take over has been made."""
_RESTS_S = (None, 0.0, 0.0, STANDBY_S, STANDBY_S)


def strikes(size: Size, seed: int, marks: Sequence[str]) -> list[Strike]:
    """Returns the whole schedule."""
    chance = random.Random(f"strikes {seed}")
    counts = {
        Target.WORKER: size.worker_kills,
        Target.OWNER: size.owner_kills,
        Target.SUPERVISOR: size.supervisor_kills,
    }
    blows: list[tuple[Target, Means]] = []
    for target, count in counts.items():
        means, weights = zip(*_MEANS[target], strict=True)
        blows += [(target, chosen) for chosen in chance.choices(means, weights, k=count)]
        blows += [(target, Means.STOP)] * round(count * _STOPS_A_KILL)
    blows += [(Target.WORKER, Means.BUSY_STOP)] * math.ceil(size.worker_kills * _STOPS_A_KILL)
    blows += [(Target.OWNER, Means.UPGRADE)] * math.ceil(size.owner_kills * _UPGRADES_A_KILL)
    blows += [(Target.OWNER, Means.STANDBY_KILL)] * math.ceil(size.owner_kills * _STANDBY_KILLS_A_KILL)
    chance.shuffle(blows)
    return [
        Strike(
            after_s=min(chance.expovariate(1 / size.mean_pause_s), 5 * size.mean_pause_s),
            target=target,
            means=means,
            slot=chance.randrange(size.workers),
            stop_s=chance.choice(_STOPS_S),
            mark=chance.choice(marks) if means is Means.MARK else "",
            passes=chance.randrange(_MOST_PASSES),
            rest_s=STANDBY_S if means is Means.STANDBY_KILL else chance.choice(_RESTS_S),
        )
        for target, means in blows
    ]
