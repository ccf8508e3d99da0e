"""How long it takes to open, and to close, an arena of another process."""

from statistics import median

from bench.figures import seconds
from gpu.measure.question import Answer, Figures
from gpu.rig import ARENAS, Rig, closed_after
from kvharbor.gpumem import Export, Mapped, attach

GIB = 1 << 30
ROUNDS = 5


def ask(rig: Rig) -> Answer:
    """Opens arenas of some sizes, each some times."""
    sizes = [rig.sized(size_gib * GIB, size_gib << 20) for size_gib in (1, 4, 16)]
    sizes = [size_bytes for size_bytes in sizes if size_bytes < rig.free_bytes() // 2]
    figures: Figures = {arena: [_opened(rig, arena, size_bytes) for size_bytes in sizes] for arena in ARENAS}
    said = [
        f"{arena}: {last['open_ms']} ms for {last['size_bytes'] / GIB:.3g} GiB, {last['open_ms_per_gib']} ms a GiB"
        for arena, (*_, last) in figures.items()
    ]
    return Answer("; ".join(said), figures)


def _opened(rig: Rig, arena: str, size_bytes: int) -> Figures:
    with rig.actor() as owner, closed_after(owner.create(rig.kind_name(arena), size_bytes)) as export:
        attach(export).close()  # the context is made by the first
        times = [_once(export) for _ in range(ROUNDS)]
    open_ms, close_ms = (round(median(each) * 1e3, 3) for each in zip(*times, strict=True))
    return {
        "size_bytes": size_bytes,
        "open_ms": open_ms,
        "open_ms_per_gib": round(open_ms / (size_bytes / GIB), 3),
        "close_ms": close_ms,
    }


def _once(export: Export) -> tuple[float, float]:
    """Seconds to open and to close."""
    mapped: list[Mapped] = []
    return seconds(lambda: mapped.append(attach(export))), seconds(lambda: mapped[0].close())
