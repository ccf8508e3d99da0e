"""Pools as the supervisor keeps them: whole, or not at all."""

import asyncio
import os
from collections.abc import Iterator

import pytest

from kvharbor.gpumem import ArenaKind, Export, Layout, Plane
from kvharbor.gpumem.plane import DataType
from kvharbor.pool import PoolConfig
from kvharbor.server.memory.arenas import HostArenas
from kvharbor.server.memory.part import DevicePart, Part
from kvharbor.server.memory.pool_memory import PoolMemory, pool_with_ledger
from kvharbor.server.memory.work_thread import DeviceThread
from kvharbor.server.pools.kept import drop_pool, keep_pool, kept_allocations, kept_pools
from kvharbor.server.pools.served_pool import PoolFacts, ServedPool
from kvharbor.server.scheduling.event_log import EventLog
from kvharbor.server.scheduling.owner import PoolOwner
from kvharbor.server.supervision.keeper import Unkept
from sessions_here import crash

LAYOUT = Layout("m", 16, (Plane("k", 1, DataType.UINT8, 64, interior="opaque"),), scratch_blocks=0, tp_size=2)
DESCRIPTOR = LAYOUT.descriptor(8)
IPC = Export(ArenaKind.CUDA_IPC, 512, device="GPU-1", offset_bytes=64, ipc_handle=bytes(range(64)), exporter_pid=7)


@pytest.fixture
def keeper() -> Iterator[Unkept]:
    """What keeps them."""
    made = Unkept()
    yield made
    made.close()


def kept(keeper: Unkept, parts: tuple[Part, ...] | None = None) -> ServedPool:
    """Keeps a pool of two parts, in host memory unless they are given, and closes what this process has of it."""

    async def keeping() -> ServedPool:
        pool, ledger = pool_with_ledger(PoolConfig(8, 16), "test", lambda: False)
        made = parts or await HostArenas().make(["", ""], DESCRIPTOR.size_bytes, "test", lambda: False)
        facts = PoolFacts("e.1", "t", "p", 600, DESCRIPTOR, tuple(part.export.device for part in made))
        owner = PoolOwner(pool, EventLog(1000), lambda: 0.0, crash)
        served = ServedPool.of(facts, PoolMemory(made, ledger), owner, grace_s=0.0)
        keep_pool(keeper, served)
        if parts is None:
            await served.memory.close()
        else:
            ledger.close()
        served.page.close()
        return served

    return asyncio.run(keeping())


def test_a_pool_comes_back_with_all_its_parts(keeper: Unkept) -> None:
    """With the facts, and each part's own memory."""
    served = kept(keeper)
    (found,) = kept_pools(keeper)
    assert found.facts == PoolFacts("e.1", "t", "p", 600, DESCRIPTOR, ("", ""))
    assert [(part.export.kind, part.export.size_bytes) for part in found.parts] == [(ArenaKind.HOST, 512)] * 2
    assert found.page_fd is not None
    fds = [found.ledger_fd, found.page_fd, *(fd for part in found.parts for fd in part.export.fds)]
    assert len({os.fstat(fd).st_ino for fd in fds}) == 4
    for fd in fds:
        os.close(fd)
    drop_pool(keeper, served)
    assert keeper.kept == {}


def test_memory_that_a_device_keeps_comes_back_by_its_handle(keeper: Unkept) -> None:
    """With the name that its keeper has for it: all other allocations are nobody's."""
    thread = DeviceThread("GPU-1", crash)
    kept(keeper, tuple(DevicePart(IPC, thread, allocation=name) for name in ("a", "b")))
    assert kept_allocations(keeper) == ["a", "b"]
    (found,) = kept_pools(keeper)
    assert [(part.export, part.allocation) for part in found.parts] == [(IPC, "a"), (IPC, "b")]
    assert found.facts.places == ("GPU-1", "GPU-1")
    assert found.page_fd is not None
    os.close(found.ledger_fd)
    os.close(found.page_fd)


def test_a_pool_of_a_version_without_status_pages_comes_back(keeper: Unkept) -> None:
    """It gets a page then."""
    kept(keeper)
    ledger_fd, page_fd = keeper.hand_over("pool/1")
    keeper.keep("pool/1", keeper.kept["pool/1"].meta, (ledger_fd,))
    (found,) = kept_pools(keeper)
    assert found.page_fd is None
    for fd in (ledger_fd, page_fd, found.ledger_fd, *(fd for part in found.parts for fd in part.export.fds)):
        os.close(fd)


@pytest.mark.parametrize("missing", ["pool/1", "pool/1/part/0", "pool/1/part/1"])
def test_what_is_not_whole_is_dropped(keeper: Unkept, missing: str) -> None:
    """The process died while it kept the pool or dropped it: nobody was told of it, or nobody has it any more."""
    kept(keeper)
    keeper.drop(missing)
    assert kept_allocations(keeper) == []
    assert kept_pools(keeper) == []
    assert keeper.kept == {}


def test_the_pool_is_kept_after_its_parts_and_dropped_before_them() -> None:
    """So that a death between two steps leaves parts without a pool, never a pool without a part."""

    class Noting(Unkept):
        steps: list[str]

        def keep(self, name: str, *rest: object, **options: object) -> None:
            self.steps.append(f"+{name}")
            super().keep(name, *rest, **options)  # type: ignore[arg-type]

        def drop(self, name: str) -> None:
            self.steps.append(f"-{name}")
            super().drop(name)

    keeper = Noting()
    keeper.steps = []
    drop_pool(keeper, kept(keeper))
    names = ["pool/1/part/0", "pool/1/part/1"]
    assert keeper.steps == [*(f"+{name}" for name in names), "+pool/1", "-pool/1", *(f"-{name}" for name in names)]
