"""Where the memory of pools comes from: one kind of arena for the whole life of the service's state."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from kvharbor.gpumem import ArenaKind, Export, HostArena, require_room
from kvharbor.gpumem.host import headroom_bytes
from kvharbor.server.memory.part import HostPart, Part
from kvharbor.server.memory.pool_memory import naming_left_memory


class Arenas(Protocol):
    """Makes the parts of pools, and takes up those that an earlier process has made."""

    @property
    def kind(self) -> ArenaKind:
        """What it makes."""

    @property
    def grace_s(self) -> float:
        """How long after its last process's exit something may still touch the memory."""

    async def try_out(self) -> None:
        """Finds out whether such memory can be shared at all, once in a life; raises StartupError."""

    async def start(self) -> None:
        """Gets ready, with what an earlier process has kept; raises StartupError. Before anything else is asked."""

    async def make(
        self, places: Sequence[str], size_bytes: int, name: str, cancelled: Callable[[], bool]
    ) -> tuple[Part, ...]:
        """Makes a part of `size_bytes` in each place; off the event loop, for as long as it takes.

        All of the memory is there then, and reads as zeros [S27]. Raises InsufficientMemory, and ReservationCancelled
        once `cancelled()` is true, with nothing taken.
        """

    def take_up(self, export: Export, allocation: str) -> Part:
        """Takes over a part, and its descriptors, that an earlier process has made and kept."""

    def close(self) -> None:
        """Ends its threads, and what still waits. The memory stays."""


class HostArenas:
    """Host memory, one arena a part."""

    kind = ArenaKind.HOST
    grace_s = 0.0
    """No device has it: nothing touches the memory once the processes have exited."""

    async def try_out(self) -> None:
        """As Arenas says; wherever Linux runs, a memfd can be shared."""

    async def start(self) -> None:
        """As Arenas says; there is nothing to do."""

    async def make(
        self, places: Sequence[str], size_bytes: int, name: str, cancelled: Callable[[], bool]
    ) -> tuple[Part, ...]:
        """As Arenas says; InsufficientMemory names the processes that still map memory of an earlier epoch."""
        return await asyncio.to_thread(_reserved, len(places), size_bytes, name, cancelled)

    def take_up(self, export: Export, allocation: str) -> Part:  # noqa: ARG002 - the signature is the protocol's
        """As Arenas says."""
        return HostPart(export)

    def close(self) -> None:
        """As Arenas says; each part has a thread of its own."""


def _reserved(part_count: int, size_bytes: int, name: str, cancelled: Callable[[], bool]) -> tuple[HostPart, ...]:
    with naming_left_memory(), contextlib.ExitStack() as undo:
        # Of all of them, before the first: nothing is taken that will not do [M4].
        needed_bytes = part_count * size_bytes
        require_room(needed_bytes, headroom_bytes(needed_bytes))
        arenas = [undo.enter_context(HostArena.create(size_bytes, name=name)) for _ in range(part_count)]
        for arena in arenas:
            arena.reserve(cancelled=cancelled)
        undo.pop_all()
    return tuple(HostPart(arena.export()) for arena in arenas)
