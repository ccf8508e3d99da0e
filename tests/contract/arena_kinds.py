"""The kinds of arena that the contract is tested on. A new kind joins by its entry in KINDS."""

from collections.abc import Callable
from dataclasses import dataclass

from kvharbor.gpumem import HostArena, Mapping


@dataclass(frozen=True, slots=True)
class ArenaKind:
    """How one kind of arena is made, handed over as descriptors, and attached."""

    name: str
    create: Callable[[int], HostArena]
    export: Callable[[HostArena], list[int]]
    attach: Callable[[list[int], int, bool], Mapping]


def _create_host(size_bytes: int) -> HostArena:
    arena = HostArena.create(size_bytes)
    arena.reserve()
    return arena


def _attach_host(fds: list[int], size_bytes: int, writable: bool) -> Mapping:
    return Mapping.attach(fds[0], size_bytes, writable=writable)


KINDS = {"host": ArenaKind("host", _create_host, lambda arena: [arena.fd], _attach_host)}
