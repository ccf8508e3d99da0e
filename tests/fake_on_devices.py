"""Fixtures of tests that have a `FakeService` whose pool lies on a device of the stub."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_service import FakeService, MakeArena
from integration.client_worker import LAYOUT
from ipc_owner import IpcOwner, OwnedArena
from kvharbor.gpumem import VmmArena, attach, device_of, driver
from kvharbor.gpumem.devices import current


@pytest.fixture
def make_ipc(ipc_owner: IpcOwner, stub_devices: tuple[str, str]) -> MakeArena:
    """Makes cuda_ipc arenas on the second device."""
    return lambda size_bytes, _: OwnedArena(ipc_owner, ipc_owner.create(size_bytes, stub_devices[1]))


@pytest.fixture
def make_vmm(stub_devices: tuple[str, str]) -> MakeArena:
    """Makes cuda_vmm arenas on the second device."""
    return lambda size_bytes, _: VmmArena.create(size_bytes, device_of(stub_devices[1]))


StartFake = Callable[[MakeArena], FakeService]


@pytest.fixture
def start_fake(tmp_path: Path) -> Iterator[StartFake]:
    """Starts fakes with arenas of a kind."""
    with contextlib.ExitStack() as ending:

        def started(make_arena: MakeArena) -> FakeService:
            service = FakeService(tmp_path, LAYOUT, 8, make_arena)
            ending.callback(service.close)
            return service

        yield started


def write(mapping: Any, content: bytes) -> None:
    """Writes at the beginning of a mapping."""
    with current(mapping.device):
        driver.write_bytes(mapping.address, content)


def read(mapping: Any, size_bytes: int) -> bytes:
    """Reads from the beginning of a mapping."""
    with current(mapping.device):
        return driver.read_bytes(mapping.address, size_bytes)


def seen_by_the_service(service: FakeService, size_bytes: int) -> bytes:
    """The first bytes of the pool, in another mapping of the arena or in the process that has it."""
    (arena,) = service.arenas
    if isinstance(arena, OwnedArena):
        return arena.owner.read(arena.exported, 0, size_bytes)
    mapping = attach(arena.export())
    try:
        return read(mapping, size_bytes)
    finally:
        mapping.close()
