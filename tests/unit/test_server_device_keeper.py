"""The keeper of a device's memory: what it does for one service process after the other, and who hears of its end."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import cuda_stub
from kvharbor.gpumem import InsufficientMemory, ReservationCancelled, device_of, runtime_of
from kvharbor.gpumem.devices import memory_of
from kvharbor.server.errors import StartupError
from kvharbor.server.memory import device_keepers
from kvharbor.server.memory.device_keeper import DeviceKeeper
from kvharbor.server.memory.device_keepers import DeviceKeepers
from kvharbor.server.supervision.keeper import Unkept

PART_BYTES = 2 * 2**20


def allocating(name: str, size_bytes: int = PART_BYTES) -> dict[str, Any]:
    """The request for memory."""
    return {"id": name, "do": "allocate", "size_bytes": size_bytes}


@pytest.fixture
def device() -> str:
    """A device of the stub in this process."""
    return cuda_stub.preload()[0]


@pytest.fixture
def keeper(device: str) -> Iterator[DeviceKeeper]:
    """A keeper in this process."""
    made = DeviceKeeper(device_of(device), runtime_of("driver"))
    yield made
    made.answer({"id": "end", "do": "hold_only", "allocations": []})


def test_an_allocation_is_exported_until_it_is_freed(keeper: DeviceKeeper, device: str) -> None:
    """Its answer is what others need to map it; freeing it twice is nothing."""
    free_bytes = memory_of(device_of(device)).free_bytes
    answer = keeper.answer(allocating("a"))
    assert (len(bytes.fromhex(answer["ipc_handle"])), answer["exporter_pid"]) == (64, os.getpid())
    assert memory_of(device_of(device)).free_bytes == free_bytes - PART_BYTES
    for _ in range(2):
        assert keeper.answer({"id": "f", "do": "free", "allocation": "a"}) == {}
    assert memory_of(device_of(device)).free_bytes == free_bytes


def test_memory_that_is_not_there_is_no_failure(keeper: DeviceKeeper, device: str) -> None:
    """The answer says how much there is; what was allocated stays."""
    keeper.answer(allocating("a"))
    facts = keeper.answer(allocating("b", 2**40))["insufficient"]
    assert (facts["needed_bytes"], facts["limited_by"]) == (2**40, f"device {device}")
    assert 0 < facts["available_bytes"] < cuda_stub.DEVICE_BYTES
    assert keeper.answer({"id": "h", "do": "hold_only", "allocations": ["a", "b"]}) == {"missing": ["b"]}


def test_what_a_later_process_does_not_know_is_freed(keeper: DeviceKeeper, device: str) -> None:
    """Its maker died before anybody was told of it: nobody has it, and nobody ever asks for it again."""
    free_bytes = memory_of(device_of(device)).free_bytes
    for name in ("known", "forgotten"):
        keeper.answer(allocating(name))
    assert keeper.answer({"id": "h", "do": "hold_only", "allocations": ["known"]}) == {"missing": []}
    assert memory_of(device_of(device)).free_bytes == free_bytes - PART_BYTES


class Here:
    """Keepers in processes of their own, on a device of their own, for services in this process."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.supervisor = Unkept()
        self.losses: list[tuple[str, str]] = []
        self._keepers: list[DeviceKeepers] = []

    async def service(self, *allocations: str, runtime: str = "driver") -> DeviceKeepers:
        """Returns what a service process has of the keepers, when it has started; the one before has ended."""
        self.end_service()
        keepers = DeviceKeepers([self.uuid], self.supervisor, runtime, lambda *loss: self.losses.append(loss))
        self._keepers.append(keepers)
        await keepers.start(allocations)
        return keepers

    def end_service(self) -> None:
        """Ends the service process that there is."""
        while self._keepers:
            self._keepers.pop().close()

    @property
    def pid(self) -> int:
        """The keeper."""
        return int(self.supervisor.kept[f"device/{self.uuid}"].meta["pid"])

    async def room(self, keepers: DeviceKeepers, size_bytes: int) -> bool:
        """Tells whether so much can be had now."""
        try:
            name, _ = await keepers.allocate(self.uuid, size_bytes, lambda: False)
        except InsufficientMemory:
            return False
        await keepers.free(self.uuid, name)
        return True


def run(scenario: Callable[[Here], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch, **faults: str) -> None:
    """Runs a scenario with keepers on the stub, whose faults are given."""
    uuid = cuda_stub.new_uuid()
    environment = {**cuda_stub.environment([uuid]), **faults}
    for name in ("LD_LIBRARY_PATH", "KVSTUB_DEVICES", "KVSTUB_GRANULARITY", *faults):
        monkeypatch.setenv(name, environment[name])
    here = Here(uuid)

    async def ran() -> None:
        try:
            async with asyncio.timeout(20):
                await scenario(here)
        finally:
            here.end_service()

    try:
        asyncio.run(ran())
    finally:
        pid = here.pid
        here.supervisor.close()
        os.waitpid(pid, 0)


MOST = cuda_stub.DEVICE_BYTES * 3 // 4


@pytest.mark.slow
def test_a_keeper_serves_the_next_process_and_forgets_what_that_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before has died between an allocation and its being kept."""

    async def scenario(here: Here) -> None:
        first = await here.service()
        kept, _ = await first.allocate(here.uuid, 2**20, lambda: False)
        await first.allocate(here.uuid, MOST, lambda: False)
        pid = here.pid
        second = await here.service(kept)
        assert (here.pid, here.losses) == (pid, [])
        assert await here.room(second, MOST)

    run(scenario, monkeypatch)


@pytest.mark.slow
def test_memory_that_comes_too_late_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wanted it has given up, as the service ends; the next one has the room."""

    async def scenario(here: Here) -> None:
        keepers = await here.service()
        with pytest.raises(ReservationCancelled):
            await keepers.allocate(here.uuid, MOST, lambda: True)
        while not await here.room(keepers, MOST):
            pass

    run(scenario, monkeypatch, KVSTUB_SLOW="cuMemAlloc:0.3")


@pytest.mark.slow
def test_the_end_of_a_keeper_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, while nobody asks it anything; and by the next process, that finds it dead."""

    async def scenario(here: Here) -> None:
        await here.service()
        os.kill(here.pid, signal.SIGKILL)
        while not here.losses:
            await asyncio.sleep(0.01)
        assert here.losses[0][0] == here.uuid
        await asyncio.to_thread(os.waitid, os.P_PID, here.pid, os.WEXITED | os.WNOWAIT)
        here.losses.clear()
        following = asyncio.create_task(here.service())
        while not here.losses:
            await asyncio.sleep(0.01)
        following.cancel()

    run(scenario, monkeypatch)


@pytest.mark.slow
def test_a_device_that_fails_ends_its_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds is not known any more; the loss names the failure."""

    async def scenario(here: Here) -> None:
        keepers = await here.service()
        asking = asyncio.create_task(keepers.allocate(here.uuid, 2**20, lambda: False))
        while not here.losses:
            await asyncio.sleep(0.01)
        assert "cuIpcGetMemHandle" in here.losses[0][1]
        asking.cancel()

    run(scenario, monkeypatch, KVSTUB_FAIL="cuIpcGetMemHandle:1")


@pytest.mark.slow
def test_kept_memory_that_no_keeper_has_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper was begun anew, and knows nothing of it: its pool must not be served."""

    async def scenario(here: Here) -> None:
        await here.service("lost")
        assert [device for device, _ in here.losses] == [here.uuid]

    run(scenario, monkeypatch)


@pytest.mark.slow
def test_a_keeper_that_hangs_when_a_process_begins_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory could not be had, and the process would never be ready."""

    async def scenario(here: Here) -> None:
        await here.service()
        monkeypatch.setattr(device_keepers, "START_LIMIT_S", 0.2)
        os.kill(here.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await here.service()
        os.kill(here.pid, signal.SIGCONT)
        assert [device for device, _ in here.losses] == [here.uuid]

    run(scenario, monkeypatch)


@pytest.mark.slow
def test_a_keeper_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the service does: in one line, with the remedy."""

    async def scenario(here: Here) -> None:
        with pytest.raises(StartupError, match=f"the keeper of device {here.uuid} cannot start: .*CUDA"):
            await here.service(runtime="cupy")
        # Its end is no loss: it never had anything.
        await asyncio.to_thread(os.waitid, os.P_PID, here.pid, os.WEXITED | os.WNOWAIT)
        await asyncio.sleep(0)
        assert here.losses == []

    run(scenario, monkeypatch)
