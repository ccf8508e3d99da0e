"""What two processes that have an arena open can do with it when the process that made it is killed."""

import contextlib
import itertools

from gpu.actor import Actor, outcome_of
from gpu.measure.question import Answer, Figures
from gpu.rig import ARENAS, Rig, closed_after
from kvharbor.gpumem import DataType, Layout

DESCRIPTOR = Layout.attention("killed", 4, 8, 128, DataType.FLOAT16, 16).descriptor(64)
BEFORE, AFTER = b"before", b"after!"


def ask(rig: Rig) -> Answer:
    """Kills an exporter of each arena."""
    figures: Figures = {arena: _killed(rig, arena) for arena in ARENAS}
    said = [
        f"{arena}: importers {'keep' if seen['read'] and seen['shared'] else 'LOSE'} the memory, kernels get "
        f"{seen['kernel']}, copies {seen['copy']}, a later process {seen['later_attach']}, and the memory "
        f"{'comes back with the last importer' if seen['freed_with_last'] else 'does NOT come back at once'}"
        for arena, seen in figures.items()
    ]
    return Answer("; ".join(said), figures)


def _killed(rig: Rig, arena: str) -> Figures:
    kind_name = rig.kind_name(arena)
    with contextlib.ExitStack() as stack:
        owner, first, second, later = (stack.enter_context(rig.actor()) for _ in range(4))
        export = owner.create(kind_name, DESCRIPTOR.size_bytes)
        with closed_after(export):
            for importer in (first, second):
                importer.attach(kind_name, export)
            first.ask("write", 0, BEFORE)
            owner.kill()
            read = second.ask("read", 0, len(BEFORE)) == BEFORE
            second.ask("write", 0, AFTER)
            seen: Figures = {
                "read": read,
                "shared": first.ask("read", 0, len(AFTER)) == AFTER,
                "copy": first.outcome("copy", DESCRIPTOR, [(1, 2)]),
                "kernel": first.outcome("store_by_kernel"),
                "later_attach": outcome_of(later.attach(kind_name, export)),
            }
        return seen | _let_go(rig, first, second, later)


def _let_go(rig: Rig, *importers: Actor) -> Figures:
    """When the memory comes back."""
    free_bytes = [rig.free_bytes()]
    for importer in importers:
        importer.outcome("detach")
        free_bytes.append(rig.free_bytes())
    freed_bytes = [after - before for before, after in itertools.pairwise(free_bytes)]
    return {"freed_bytes_by_detach": freed_bytes, "freed_with_last": sum(freed_bytes) >= DESCRIPTOR.size_bytes}
