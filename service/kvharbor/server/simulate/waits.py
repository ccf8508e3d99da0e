"""How long requests wait, when they come as the trace says."""

from collections.abc import Sequence

from kvharbor.server.replay.modes import Course, run_concurrently
from kvharbor.server.replay.pool_cache import PoolCache
from kvharbor.server.simulate.fits import servable
from kvharbor.server.simulate.layouts import Layout
from kvharbor.server.simulate.room import Room
from kvharbor.server.traces.trace import Request


class PrivateUnits:
    """Memory of which each request has a part of its own, and nothing stays behind it."""

    evicted_block_count = 0

    def __init__(self, unit_count: int) -> None:
        self._free_count = unit_count
        self._taken: dict[int, int] = {}

    def admit(self, index: int, _request: Request, unit_count: int) -> int | None:
        """Takes as many units as the request needs in all; there is never a hit."""
        if unit_count > self._free_count:
            return None
        self._free_count -= unit_count
        self._taken[index] = unit_count
        return 0

    def release(self, index: int) -> None:
        """Gives them back."""
        self._free_count += self._taken.pop(index)


def waits(requests: Sequence[Request], layout: Layout, room: Room) -> Course:
    """Runs the requests that can be served in the trace's time, each with room for its full length from the start."""
    unit_count = room.unit_count(layout.unit_tokens)
    served = servable(requests, layout, unit_count)
    if layout.shares:
        return run_concurrently(
            served, PoolCache(unit_count, "lru"), lambda one: layout.unit_count(one) - len(one.block_names)
        )
    return run_concurrently(served, PrivateUnits(unit_count), layout.unit_count)
