"""What a worker's kill looks like from outside while its kernels store: when quiet is known, and when it is true."""

import contextlib
from collections.abc import Sequence
from statistics import median
from typing import Any

from contract.arena_kinds import TestedKind
from gpu.actor import Actor
from gpu.death import DeathTimes, kill_and_watch
from gpu.measure.question import Answer, Figures
from gpu.rig import ARENAS, Rig, closed_after
from gpu.writers import SLOT_BYTES, Load
from kvharbor.gpumem import Export, attach

ARENA_BYTES = 1 << 21


def ask(rig: Rig) -> Answer:
    """Kills a worker some times with each arena and load."""
    rounds = rig.sized(5, 1)
    figures: Figures = {}
    deaths: list[DeathTimes] = []
    for arena in ARENAS:
        for load in Load:
            alike = [_one(rig, arena, load) for _ in range(rounds)]
            figures[f"{arena}.{load}"] = summary(alike)
            deaths += alike
    return Answer(conclusion(deaths), figures)


def conclusion(deaths: Sequence[DeathTimes]) -> str:
    """Says whether a readable pidfd has meant that all stores were over."""
    worst = max(deaths, key=lambda death: death.late_stores_ms + death.pidfd_doubt_ms)
    latest_ms = worst.late_stores_ms + worst.pidfd_doubt_ms
    if latest_ms <= 0:
        said = f"no store came after the pidfd was readable; the nearest was {-latest_ms:.2f} ms before"
    elif worst.late_stores_ms <= 0:
        said = f"no store was seen after the pidfd was, but one may have come up to {latest_ms:.2f} ms after it"
    else:
        said = f"a store came up to {latest_ms:.2f} ms AFTER the pidfd was readable: device_grace_s must cover that"
    return f"in {len(deaths)} kills {said}"


def summary(deaths: Sequence[DeathTimes]) -> Figures:
    """Median and worst of each time, in milliseconds."""
    names = ("socket_end_ms", "pidfd_ms", "last_store_ms", "late_stores_ms", "pidfd_doubt_ms")
    taken = {name: [getattr(death, name) for death in deaths] for name in names}
    return {name: {"median": round(median(each), 3), "worst": round(max(each), 3)} for name, each in taken.items()}


def _one(rig: Rig, arena: str, load: Load) -> DeathTimes:
    kind_name = rig.kind_name(arena)
    with rig.actor() as owner, rig.actor() as worker:
        export = owner.create(kind_name, ARENA_BYTES)
        with closed_after(export):
            return death_of(worker, rig.kind(arena), kind_name, export, load)


def death_of(worker: Actor, kind: TestedKind, kind_name: str, export: Export, load: Load) -> DeathTimes:
    """Lets a worker store into an arena, and kills it; watched through a mapping of this process's own."""
    mapped: Any = attach(export)
    with contextlib.closing(mapped):
        worker.attach(kind_name, export)
        slot_count = worker.ask("start_writing", load)

        def slots() -> Sequence[int]:
            return memoryview(kind.read(mapped, 0, slot_count * SLOT_BYTES)).cast("Q")

        return kill_and_watch(worker, slots)
