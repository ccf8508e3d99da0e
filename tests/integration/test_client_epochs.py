"""A service that is gone with its state, and the next one at the same place: real processes, kill -9."""

import threading
from pathlib import Path

import numpy as np
import pytest

from conftest import StartService
from integration.client_kinds import Connect, after_epochs
from integration.client_worker import LAYOUT, pool_size, read, stamp
from kvharbor.client import EpochEnded, InsufficientMemory, SessionLost, StaleEpoch, connect
from service_process import DEADLINE_S
from waiting import until

pytestmark = pytest.mark.slow


def test_an_engine_goes_on_in_the_next_epoch(open_harbor: Connect, start_fresh: StartService, tmp_path: Path) -> None:
    """C12: the views of before show the new pool, which others share; what was there is gone, and says so."""
    place = tmp_path / "kv.sock"
    first = start_fresh(socket=place)
    told: list[tuple[str, str]] = []
    harbor = open_harbor(first.target, on_epoch=lambda old, new: told.append((old, new)))
    pool = harbor.open_pool("p", LAYOUT, pool_size(8))
    view, address = pool.views.numpy("k", 0), pool.views.numpy("k", 0).ctypes.data
    old_epoch, old_id = harbor.epoch, pool.id
    held = pool.allocate(range(20))
    stamp(pool, held, 0, range(20))
    held.commit(20)
    first.kill()
    second = start_fresh(socket=place)
    assert after_epochs(pool.stats).free_block_count == 8
    assert told == [(old_epoch, harbor.epoch)]
    assert harbor.epoch == second.wait_for("ready")["epoch"]
    assert pool.id != old_id
    with pytest.raises(EpochEnded, match=old_epoch):
        held.commit(20)
    held.release()
    assert not view.any()
    with pool.allocate(range(20)) as again:
        assert again.cached_tokens == 0
        view[again.slots(0, 20)] = np.arange(20)[:, None, None]
        stamp(pool, again, 0, range(20))
        again.commit(20)
    assert view.ctypes.data == address
    other = open_harbor(second.target).open_pool("p", LAYOUT)
    with other.allocate(range(20)) as reader:
        assert reader.cached_tokens == 16
        assert read(other, reader, 0, 16) == list(range(16))


def test_engines_of_any_size_notation_find_one_pool(start_fresh: StartService, tmp_path: Path) -> None:
    """Two engines that had asked by different numbers both come back, whoever is first."""
    place = tmp_path / "kv.sock"
    service = start_fresh(socket=place)
    with (
        connect(service.target, on_epoch=lambda *_: None) as one,
        connect(service.target, on_epoch=lambda *_: None) as two,
    ):
        pools = [one.open_pool("p", LAYOUT, pool_size(8) + 7), two.open_pool("p", LAYOUT)]
        service.kill()
        start_fresh(socket=place)
        assert {after_epochs(pool.stats).pool_id for pool in pools} == {pools[0].id}
        assert pools[0].id == pools[1].id


def test_without_on_epoch_the_harbor_is_over_and_a_new_one_begins(start_fresh: StartService, tmp_path: Path) -> None:
    """As the README's loop does it; the distinct reason of an old handle is that of its service."""
    place = tmp_path / "kv.sock"
    service = start_fresh(socket=place)
    harbor = connect(service.target)
    pool = harbor.open_pool("p", LAYOUT, pool_size(8))
    held = pool.allocate(range(16))
    service.kill()
    start_fresh(socket=place)
    with pytest.raises(SessionLost, match="connect again"):
        after_epochs(pool.stats)
    with connect(service.target) as again:
        stale = again.open_pool("p", LAYOUT, pool_size(8))
        stale.calls.pool_id = held.id.rsplit(".", 2)[0]
        with pytest.raises(StaleEpoch):
            stale.stats()
    held.release()
    harbor.close()


def test_an_engine_that_does_not_fit_any_more_is_told_why(start_fresh: StartService, tmp_path: Path) -> None:
    """The next service has less memory for pools; waiting may help, so the harbor waits, and ends when it is closed."""
    place = tmp_path / "kv.sock"
    service = start_fresh(socket=place)
    harbor = connect(service.target, on_epoch=lambda *_: None)
    pool = harbor.open_pool("p", LAYOUT, pool_size(2000))
    service.kill()
    second = start_fresh(socket=place, memory="1MiB")
    with connect(second.target) as other, pytest.raises(InsufficientMemory):
        other.open_pool("p", LAYOUT, pool_size(2000))
    second.wait_for("session began", 2)
    harbor.close()
    assert pool.link.closed


def test_the_epoch_ends_under_calls_that_wait(start_fresh: StartService, tmp_path: Path) -> None:
    """An engine whose thread waits in allocate can be stopped by on_epoch: the wait ends first."""
    place = tmp_path / "kv.sock"
    service = start_fresh(socket=place)
    idle = threading.Event()
    with connect(service.target, timeout_s=DEADLINE_S, on_epoch=lambda *_: idle.wait(DEADLINE_S)) as harbor:
        pool = harbor.open_pool("p", LAYOUT, pool_size(8))
        held = pool.allocate(range(128))
        outcome: list[BaseException] = []

        def engine() -> None:
            try:
                pool.allocate(range(1000, 1128), wait_s=DEADLINE_S)
            except EpochEnded as ended:
                outcome.append(ended)
            idle.set()

        thread = threading.Thread(target=engine)
        thread.start()
        until(lambda: pool.stats().waiting_count)
        service.kill()
        start_fresh(socket=place)
        thread.join(DEADLINE_S)
        assert len(outcome) == 1
        with pool.allocate(range(16)):
            pass
        held.release()
