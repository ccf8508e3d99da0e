"""How much memory all pools together may have."""

from kvharbor.gpumem import memory_room
from kvharbor.server.errors import StartupError
from kvharbor.server.settings import Settings
from kvharbor.server.sizes import Share


def memory_budget_bytes(settings: Settings) -> int:
    """Returns what the setting `memory` comes to here and now; raises StartupError if there is not so much."""
    room = memory_room()
    if isinstance(settings.memory, Share):
        return settings.memory.of(room.available_bytes)
    if settings.memory > room.available_bytes:
        raise StartupError(
            f"setting memory: needs {settings.memory} bytes, have {room.available_bytes} "
            f"(limited by {room.limited_by}): set less, or raise the limit"
        )
    return settings.memory
