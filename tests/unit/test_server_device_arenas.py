"""Parts on devices in this process, on the stub of the driver: who calls the device, and what becomes of failures."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cuda_stub
from contract.leaks import open_descriptors
from kvharbor.gpumem import (
    DataType,
    DeviceFailed,
    InsufficientMemory,
    Layout,
    Plane,
    ReservationCancelled,
    attach,
    device_of,
    driver,
)
from kvharbor.gpumem.devices import current, memory_of, release_context
from kvharbor.server.memory.device_arenas import VmmArenas
from kvharbor.server.memory.work_thread import DeviceThread

LAYOUT = Layout("m", 16, (Plane("k", 2, DataType.UINT8, 64, interior="opaque"),), scratch_blocks=0, tp_size=2)
DESCRIPTOR = LAYOUT.descriptor(8)


class Crashes:
    """Failures for which the process would have ended."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []

    def __call__(self, failure: BaseException) -> None:
        self.failures.append(failure)


@pytest.fixture
def crashes() -> Crashes:
    """None yet."""
    return Crashes()


@pytest.fixture
def devices() -> tuple[str, str]:
    """The two devices of the stub in this process."""
    return cuda_stub.preload()


@pytest.fixture
def arenas(devices: tuple[str, str], crashes: Crashes) -> Iterator[VmmArenas]:
    """Arenas on both devices. Nothing of them may be left on these."""
    before = [memory_of(device_of(uuid)).free_bytes for uuid in devices]
    made = VmmArenas({uuid: DeviceThread(uuid, crashes) for uuid in devices}, grace_s=1.0)
    yield made
    made.close()
    assert [memory_of(device_of(uuid)).free_bytes for uuid in devices] == before


def test_the_event_loop_never_calls_a_device(
    arenas: VmmArenas, devices: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S25: each device is called on one thread, which is its own, whatever becomes of a part."""
    callers: set[str] = set()
    call: Callable[..., Any] = driver.call

    def noting(function: str, *arguments: object) -> Any:
        callers.add(threading.current_thread().name)
        return call(function, *arguments)

    async def scenario() -> None:
        parts = await arenas.make(devices, DESCRIPTOR.size_bytes, "test", lambda: False)
        taken_up = arenas.take_up(parts[0].export, "")
        await taken_up.copy(DESCRIPTOR, [(0, 1)])
        await parts[1].copy(DESCRIPTOR, [(2, 3)])
        await parts[1].close()
        await taken_up.close()

    monkeypatch.setattr(driver, "call", noting)
    asyncio.run(scenario())
    assert callers == {f"device-{uuid}_0" for uuid in devices}


def test_memory_reads_as_zeros_before_anybody_has_it(arenas: VmmArenas, devices: tuple[str, str]) -> None:
    """S27: the stub, like a device, gives memory as it was left."""

    async def scenario() -> bytes:
        (part,) = await arenas.make(devices[:1], 2**20, "test", lambda: False)
        mapped: Any = attach(part.export)
        with current(device_of(devices[0])):
            content = driver.read_bytes(mapped.address, 2**20)
        mapped.close()
        await part.close()
        return content

    assert asyncio.run(scenario()) == bytes(2**20)


def test_parts_are_made_all_or_none(arenas: VmmArenas, devices: tuple[str, str], crashes: Crashes) -> None:
    """S26: what the first device has given goes back when the second has no room; that ends no process."""
    free = [memory_of(device_of(uuid)).free_bytes for uuid in devices]

    async def scenario() -> None:
        with pytest.raises(InsufficientMemory, match="earlier epoch"):
            await arenas.make([*devices, devices[0]], cuda_stub.DEVICE_BYTES * 3 // 4, "test", lambda: False)

    asyncio.run(scenario())
    assert [memory_of(device_of(uuid)).free_bytes for uuid in devices] == free
    assert crashes.failures == []


def test_a_service_that_ends_makes_no_more_parts(arenas: VmmArenas, devices: tuple[str, str]) -> None:
    """What was made by then goes back."""
    made_count = 0

    def cancelled() -> bool:
        nonlocal made_count
        made_count += 1
        return made_count > 1

    async def scenario() -> None:
        with pytest.raises(ReservationCancelled):
            await arenas.make(devices, 2**20, "test", cancelled)

    asyncio.run(scenario())


def test_a_call_that_fails_ends_the_process(
    arenas: VmmArenas, devices: tuple[str, str], crashes: Crashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S25: what the device holds is not known any more."""

    async def scenario() -> None:
        (part,) = await arenas.make(devices[:1], DESCRIPTOR.size_bytes, "test", lambda: False)
        monkeypatch.setenv("KVSTUB_FAIL", "cuMemcpy2DAsync:1")
        with pytest.raises(DeviceFailed):
            await part.copy(DESCRIPTOR, [(0, 1)])
        monkeypatch.delenv("KVSTUB_FAIL")
        await part.close()

    asyncio.run(scenario())
    (failure,) = crashes.failures
    assert isinstance(failure, DeviceFailed)
    assert failure.call == "cuMemcpy2DAsync"


@pytest.mark.parametrize("fault", ["cuMemcpy2DAsync:2:2", "cuStreamSynchronize:1:2"])
def test_a_copy_that_is_queued_is_never_refused(
    fault: str, arenas: VmmArenas, devices: tuple[str, str], crashes: Crashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S26: whoever were told that there is no room would give away a block that is still written."""

    async def scenario() -> None:
        (part,) = await arenas.make(devices[:1], DESCRIPTOR.size_bytes, "test", lambda: False)
        monkeypatch.setenv("KVSTUB_FAIL", fault)
        with pytest.raises(DeviceFailed):
            await part.copy(DESCRIPTOR, [(0, 1), (0, 2)])
        monkeypatch.delenv("KVSTUB_FAIL")
        await part.close()

    asyncio.run(scenario())
    assert [getattr(failure, "call", "") for failure in crashes.failures] == [fault.split(":")[0]]


@pytest.mark.parametrize("call", ["cuDevicePrimaryCtxRetain", "cuMemMap", "cuStreamCreate"])
def test_a_copy_that_has_not_begun_is_refused_for_want_of_memory(
    call: str, arenas: VmmArenas, devices: tuple[str, str], crashes: Crashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is broken: the next one may find room."""

    async def scenario() -> None:
        (part,) = await arenas.make(devices[:1], DESCRIPTOR.size_bytes, "test", lambda: False)
        release_context(device_of(devices[0]))
        monkeypatch.setenv("KVSTUB_FAIL", f"{call}:1:2")
        with pytest.raises(InsufficientMemory, match=f"{call}.*the service's own context"):
            await part.copy(DESCRIPTOR, [(0, 1)])
        monkeypatch.delenv("KVSTUB_FAIL")
        await part.copy(DESCRIPTOR, [(0, 1)])
        await part.close()

    asyncio.run(scenario())
    assert crashes.failures == []


def test_memory_that_is_not_let_go_ends_the_process(
    arenas: VmmArenas, devices: tuple[str, str], crashes: Crashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Want of memory is a refusal of what is asked for, and letting go asks for nothing."""
    fds = open_descriptors()

    async def scenario() -> None:
        (part,) = await arenas.make(devices[:1], DESCRIPTOR.size_bytes, "test", lambda: False)
        await part.copy(DESCRIPTOR, [(0, 1)])
        monkeypatch.setenv("KVSTUB_FAIL", "cuMemAddressFree:1:2")
        with pytest.raises(DeviceFailed):
            await part.close()
        monkeypatch.delenv("KVSTUB_FAIL")

    asyncio.run(scenario())
    assert [getattr(failure, "call", "") for failure in crashes.failures] == ["cuMemAddressFree"]
    assert open_descriptors() == fds
