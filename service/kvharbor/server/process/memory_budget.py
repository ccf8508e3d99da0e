"""How much memory all pools together may have."""

from kvharbor.gpumem import left_memory, memory_room
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.errors import StartupError
from kvharbor.server.sizes import Share, exact_size


def memory_budget_bytes(settings: Settings) -> int:
    """Returns what the setting `memory` comes to here and now; raises StartupError if there is not so much.

    What workers still map of an earlier epoch counts as there: they let go of it when they find this one, and until
    then a pool that does not fit beside it is refused.
    """
    room = memory_room()
    available_bytes = room.available_bytes + left_memory().held_bytes
    if isinstance(settings.memory, Share):
        return settings.memory.of(available_bytes)
    if settings.memory > available_bytes:
        raise StartupError(
            f"setting memory: needs {exact_size(settings.memory)}, have {exact_size(available_bytes)} "
            f"(limited by {room.limited_by}): set less, or raise the limit"
        )
    return settings.memory
