"""Memory of the host: how much may be taken, and by whom some of it is still held."""

from collections.abc import Iterator
from pathlib import Path

from kvharbor.gpumem import left_memory, memory_room
from kvharbor.gpumem.arena import ArenaKind
from kvharbor.server.doctor.check import Check, Outcome, fail, ok, warn
from kvharbor.server.doctor.place import Place
from kvharbor.server.doctor.surroundings import Surroundings
from kvharbor.server.sizes import Share, format_size

_PROCESSES_BYTES = 400 * 2**20
"""What the service's own processes need beside the arenas, at their most."""

_LIMIT = {
    Place.HOST: "MemoryMax= of the unit, where that is the limit",
    Place.CONTAINER: "docker run --memory",
    Place.POD: "resources.limits.memory of the service's container",
}


def checks(around: Surroundings) -> Iterator[Check]:
    """Yields the checks of this topic."""
    yield Check("memory.room", lambda: _room(around), frozenset({ArenaKind.HOST}))
    yield Check("memory.left_behind", lambda: _left_behind(around.root))


def _room(around: Surroundings) -> Outcome:
    room = memory_room(around.root)
    found = f"{format_size(room.available_bytes)} may be taken (limited by {room.limited_by})"
    wanted = around.settings.memory
    raise_limit = f"raise the limit ({_LIMIT[around.place]})"
    if around.arena is ArenaKind.HOST and not isinstance(wanted, Share) and wanted > room.available_bytes:
        return fail(f"{found}, the setting memory asks for {format_size(wanted)}", f"set less, or {raise_limit}")
    if room.available_bytes < _PROCESSES_BYTES:
        return warn(f"{found}: less than the service's own processes may need", f"free memory, or {raise_limit}")
    return ok(found)


def _left_behind(root: Path) -> Outcome:
    left = left_memory(root)
    if not left.held_bytes:
        return ok("no process that this one may look into holds an arena without an owner")
    return warn(
        f"processes map {format_size(left.held_bytes)} of arenas whose owner is gone, by pid {left.held_by}",
        "they let go when they find the new service; end those that do not",
    )
