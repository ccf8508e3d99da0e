"""A new epoch under a living client. The service is a fake."""

import asyncio
import contextlib
import gc
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fake_service import DEADLINE_S, FakeService
from integration.client_kinds import Connect, after_epochs
from integration.client_worker import LAYOUT
from kvharbor.client import EpochEnded, PoolSizeMismatch, ServiceBug, SessionLost, aio, connect
from moments import wait_for
from waiting import repeat, until

Epochs = tuple[str, str]


def test_views_show_the_new_memory_at_the_old_addresses(open_harbor: Connect, service: FakeService) -> None:
    """C12: arrays that were taken in the old epoch are arrays of the new one; the old memory is gone from here."""
    epochs: queue.Queue[Epochs] = queue.Queue()
    harbor = open_harbor(service.target, on_epoch=lambda old, new: epochs.put((old, new)))
    pool = harbor.open_pool("p", LAYOUT)
    view = pool.views.numpy("k", 0)
    held = pool.allocate(range(16))
    view[held.slots(0, 16)] = 3.0
    address = view.ctypes.data
    service.new_epoch()
    assert after_epochs(pool.stats).pool_id == "e2.1"
    assert epochs.get_nowait() == ("e1", "e2")
    assert (harbor.epoch, pool.id) == ("e2", "e2.1")
    assert not view.any()
    view[5, 0, 0, 0] = 7.0
    assert 7.0 in np.frombuffer(service.memory(), np.float32)
    assert (view.ctypes.data, pool.views.numpy("k", 0).ctypes.data) == (address, address)
    assert service.mapped_epochs() == {"e2"}
    uses: list[Callable[[], Any]] = [
        lambda: held.commit(16),
        lambda: held.slots(0, 1),
        lambda: held.extend(1),
        lambda: held.fork(1),
    ]
    for use in uses:
        with pytest.raises(EpochEnded, match="epoch e1, which has ended"):
            use()
    held.release()
    with pool.allocate(range(16)) as again:
        assert again.id.startswith("e2.")
    del view
    gc.collect()


def test_a_service_that_waits_for_the_old_memory_gets_it_and_is_waited_for(
    open_harbor: Connect, service: FakeService
) -> None:
    """C12: the new epoch is told before the service is ready, which it may not be until the old memory is gone."""
    harbor = open_harbor(service.target, on_epoch=lambda *_: None)
    pool = harbor.open_pool("p", LAYOUT)
    assert service.mapped_epochs() == {"e1"}
    service.starting = True
    service.new_epoch()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(after_epochs, pool.stats)
        while service.hellos.get(timeout=DEADLINE_S).resume.epoch != "e1":
            pass
        for _ in range(2):
            assert not service.hellos.get(timeout=DEADLINE_S).HasField("resume")
        assert service.mapped_epochs() == {"e2"}  # that of the fake itself
        # One that gives up is followed by another.
        service.new_epoch()
        assert not service.hellos.get(timeout=DEADLINE_S).HasField("resume")
        service.starting = False
        assert asked.result(DEADLINE_S).pool_id == "e3.1"


def test_without_on_epoch_the_harbor_ends_and_its_memory_stays(open_harbor: Connect, service: FakeService) -> None:
    """Arrays stay readable, as after a close; every call says that the service was replaced."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    view = pool.views.numpy("k", 0)
    held = pool.allocate(range(16))
    view[held.slots(0, 16)] = 3.0
    service.new_epoch()
    for lost in (pool.stats, lambda: pool.allocate(range(3)), lambda: held.commit(16)):
        with pytest.raises(SessionLost, match=r"another epoch \(e2, was e1\)"):
            repeat(lost)
    assert (view[held.table[0]] == 3.0).all()
    held.release()


def test_calls_that_wait_are_told_at_once_so_that_the_engine_can_stop(service: FakeService) -> None:
    """on_epoch may wait for an engine that waits in a call: the call ends first. Calls made later get the new pool."""
    waiting_ended = threading.Event()
    with connect(service.target, on_epoch=lambda *_: waiting_ended.wait(DEADLINE_S)) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        service.kill()
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(pool.allocate, range(16))
            until(lambda: bool(pool.link._changed._waiters))  # type: ignore[attr-defined]
            service.new_epoch()
            with pytest.raises(EpochEnded):
                waiting.result(DEADLINE_S)
            later = thread.submit(pool.allocate, range(16))
            waiting_ended.set()
            sequence = later.result(DEADLINE_S)
        assert sequence.id.startswith("e2.")
        sequence.release()


def test_the_memory_stays_until_on_epoch_returns(service: FakeService) -> None:
    """Until then something may be at work on it; sequences are over already, so that it finds out."""
    asked, stopped = threading.Event(), threading.Event()

    def on_epoch(old: str, new: str) -> None:
        asked.set()
        stopped.wait(DEADLINE_S)

    with connect(service.target, on_epoch=on_epoch) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        held = pool.allocate(range(16))
        view = pool.views.numpy("k", 0)
        view[held.slots(0, 16)] = 3.0
        table = held.table
        service.new_epoch()
        assert asked.wait(DEADLINE_S)
        assert (view[table[0]] == 3.0).all()
        with pytest.raises(EpochEnded):
            held.require_held()
        stopped.set()
        after_epochs(pool.stats)
        assert not view.any()
        del view


def test_asyncio_awaits_on_epoch_on_its_loop(service: FakeService) -> None:
    """A coroutine that stops the engine's tasks is as good as a function."""

    async def body() -> None:
        told: list[Epochs] = []

        async def on_epoch(old: str, new: str) -> None:
            await asyncio.sleep(0)
            told.append((old, new))

        async with aio.connect(service.target, on_epoch=on_epoch) as harbor:
            pool = await harbor.open_pool("p", LAYOUT)
            await asyncio.to_thread(service.new_epoch)
            with contextlib.suppress(EpochEnded):
                await pool.stats()
            await pool.stats()
            assert (told, pool.id) == ([("e1", "e2")], "e2.1")

    asyncio.run(body())


def test_an_on_epoch_that_fails_ends_the_harbor(service: FakeService) -> None:
    """Nobody knows what is at work on the memory: it stays mapped, and calls say why nothing goes on."""

    def on_epoch(old: str, new: str) -> None:
        raise RuntimeError("the engine does not stop")

    with connect(service.target, on_epoch=on_epoch) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        service.new_epoch()
        with pytest.raises(ServiceBug, match="the engine does not stop"):
            after_epochs(pool.stats)
        assert service.mapped_epochs() == {"e1", "e2"}


def test_a_pool_of_another_size_ends_the_harbor(service: FakeService) -> None:
    """Views have the old addresses, so the new memory must be laid out as the old."""
    with connect(service.target, on_epoch=lambda *_: None) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        service.descriptor = LAYOUT.descriptor(32)
        service.new_epoch()
        with pytest.raises(PoolSizeMismatch, match="32 blocks"):
            after_epochs(pool.stats)


def test_an_epoch_that_ends_while_it_begins_is_followed_by_the_next(service: FakeService) -> None:
    """The harbor goes on with whatever is there in the end; on_epoch is called once, as nothing was at work since."""
    told: list[Epochs] = []
    with connect(service.target, on_epoch=lambda old, new: told.append((old, new))) as harbor:
        pool = harbor.open_pool("p", LAYOUT)

        def end_again() -> None:
            service.before.clear()
            service.new_epoch()

        service.before["OpenPool"] = end_again
        service.new_epoch()
        assert after_epochs(pool.stats).pool_id == "e3.1"
        assert (told, harbor.epoch) == ([("e1", "e2")], "e3")
        assert service.mapped_epochs() == {"e3"}


FORKING = """
import os, sys
from kvharbor.client import HarborClosed, connect

link = connect(sys.argv[1])._link
print("connected", flush=True)
while len(link._returning._sides) < 2:
    os.sched_yield()
with link.guard:
    child = os.fork()
if child == 0:
    try:
        link.on_side(lambda side: side.lost)
    except HarborClosed:
        link.close()
        print([side._connection.fileno() for side in link._returning._sides], flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("forked", flush=True)
input()
print(link.on_side(lambda side: side.lost), flush=True)
link.close()
"""


def test_a_fork_closes_every_side_socket_old_and_new(service: FakeService) -> None:
    """The child has no watching thread and no lock that one could hold; the session goes on in the parent."""
    service.opened = True
    forked = threading.Event()
    service.before["Resume"] = wait_for(forked)
    script = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{FORKING}", service.target]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        service.restart()
        assert [process.stdout.readline() for _ in range(2)] == ["[-1, -1]\n", "forked\n"]
        forked.set()
        service.wait_until_resumed()
        assert process.communicate("\n")[0] == "False\n"
