"""A new epoch under a client of a pool in device memory: the driver is the stub, the service a fake.

Never run on hardware: see tests/cuda_stub/README.md.
"""

import asyncio
import contextlib
import queue
from typing import Any

import pytest

from fake_on_devices import StartFake, read, seen_by_the_service, write
from fake_service import DEADLINE_S, MakeArena
from integration.client_kinds import Connect, after_epochs
from integration.client_worker import LAYOUT
from kvharbor.client import EpochEnded, PoolDevicesMismatch, StateRefused, aio, connect
from kvharbor.gpumem import ArenaClosed, VmmArena, device_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_here")]


def test_vmm_memory_is_replaced_in_its_place(open_harbor: Connect, start_fake: StartFake, make_vmm: MakeArena) -> None:
    """C12: the same addresses and views show the new pool's memory; nothing has moved."""
    service, moved = start_fake(make_vmm), list[Any]()
    harbor = open_harbor(service.target, on_epoch=lambda *_: None, on_moved=moved.append)
    pool = harbor.open_pool("p", LAYOUT)
    address, views = pool.memory.mapping.address, pool.views
    write(pool.memory.mapping, b"old")
    service.new_epoch()
    assert after_epochs(pool.stats).pool_id == "e2.1"
    assert (pool.memory.mapping.address, pool.views) == (address, views)
    assert read(pool.memory.mapping, 3) == b"\0\0\0"
    write(pool.memory.mapping, b"new")
    assert seen_by_the_service(service, 3) == b"new"
    assert moved == []
    assert list(service.calls["OpenPool"][-1].devices) == list(pool.memory.devices)


def test_ipc_memory_moves_and_the_engine_takes_new_views(
    open_harbor: Connect, start_fake: StartFake, make_ipc: MakeArena
) -> None:
    """C15: before any call on the pool is made; the old views raise, as what they showed is gone."""
    service, moved = start_fake(make_ipc), queue.Queue[Any]()
    harbor = open_harbor(
        service.target, on_epoch=lambda *_: None, on_moved=lambda pool: moved.put((pool.id, pool.views))
    )
    pool = harbor.open_pool("p", LAYOUT)
    old_views = pool.views
    write(pool.memory.mapping, b"old")
    service.new_epoch()
    assert after_epochs(pool.stats).pool_id == "e2.1"
    assert moved.get(timeout=DEADLINE_S) == ("e1.1", pool.views)
    assert moved.empty()
    assert pool.views is not old_views
    with pytest.raises(ArenaClosed):
        old_views.page("k", 0, 0)
    assert read(pool.memory.mapping, 3) == b"\0\0\0"
    write(pool.memory.mapping, b"new")
    assert seen_by_the_service(service, 3) == b"new"


def test_ipc_memory_that_is_still_in_use_ends_the_harbor(
    open_harbor: Connect, start_fake: StartFake, make_ipc: MakeArena
) -> None:
    """C15: an array over memory that goes away would break the whole process's context."""
    service = start_fake(make_ipc)
    harbor = open_harbor(service.target, on_epoch=lambda *_: None)
    pool = harbor.open_pool("p", LAYOUT)
    array = pool.memory.mapping.borrow()
    service.new_epoch()
    with pytest.raises(StateRefused) as error:
        after_epochs(pool.stats)
    assert error.value.reason == "MAPPING_IN_USE"
    assert pool.memory.mapping.address
    del array


def test_asyncio_awaits_on_moved_on_its_loop(start_fake: StartFake, make_ipc: MakeArena) -> None:
    """As on_epoch: a coroutine may rebuild the engine's tensors."""
    service = start_fake(make_ipc)

    async def body() -> None:
        told: list[str] = []

        async def on_moved(pool: aio.Pool) -> None:
            await asyncio.sleep(0)
            told.append(pool.name)

        async with aio.connect(service.target, on_epoch=lambda *_: None, on_moved=on_moved) as harbor:
            pool = await harbor.open_pool("p", LAYOUT)
            await asyncio.to_thread(service.new_epoch)
            with contextlib.suppress(EpochEnded):
                await pool.stats()
            await pool.stats()
            assert told == ["p"]

    asyncio.run(body())


def test_a_pool_that_lies_elsewhere_in_the_new_epoch_ends_the_harbor(
    start_fake: StartFake, stub_devices: tuple[str, str]
) -> None:
    """Tensors belong to a device, and so does the engine's part."""
    places = iter([stub_devices[1], stub_devices[0]])
    service = start_fake(lambda size_bytes, _: VmmArena.create(size_bytes, device_of(next(places))))
    with connect(service.target, on_epoch=lambda *_: None) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        service.new_epoch()
        with pytest.raises(PoolDevicesMismatch, match=f"{stub_devices[0]} in the new epoch"):
            after_epochs(pool.stats)
