"""A client of a pool in device memory: the driver is the stub, the service a fake. See tests/cuda_stub/README.md.

Never run on hardware: where a kernel would write, the tests write by the driver.
"""

import dataclasses
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from fake_on_devices import StartFake, read, seen_by_the_service, write
from fake_service import FakeService, MakeArena
from integration.client_kinds import Connect
from integration.client_worker import LAYOUT
from kvharbor.client import DeviceNotVisible, MpsClientRefused, StateRefused, connect
from kvharbor.client.ordering import DeviceOrder
from kvharbor.gpumem import Arena, ArenaKind, DeviceFailed, Export, GpumemError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_here")]


@dataclass(frozen=True)
class Disguised:
    """An arena that is announced otherwise than it is."""

    arena: Arena
    changes: dict[str, Any]

    @property
    def kind(self) -> ArenaKind:
        return self.arena.kind

    @property
    def size_bytes(self) -> int:
        return self.arena.size_bytes

    def export(self) -> Export:
        return dataclasses.replace(self.arena.export(), **self.changes)

    def close(self) -> None:
        self.arena.close()


@pytest.fixture(params=["cuda_ipc", "cuda_vmm"])
def service(request: pytest.FixtureRequest, start_fake: StartFake) -> FakeService:
    """A fake whose pool lies on the second device."""
    make: MakeArena = request.getfixturevalue("make_ipc" if request.param == "cuda_ipc" else "make_vmm")
    return start_fake(make)


def test_a_pool_is_mapped_where_its_uuid_says(
    open_harbor: Connect, service: FakeService, stub_devices: tuple[str, str]
) -> None:
    """F5: the service hears which devices are seen here, and what is written here is there."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    mapping = pool.memory.mapping
    assert (mapping.device.uuid, mapping.device.ordinal) == (stub_devices[1], 1)
    assert pool.memory.devices == (stub_devices[1],)
    write(mapping, b"written here")
    assert seen_by_the_service(service, 12) == b"written here"
    first, second = service.attaches
    assert not first.HasField("device_view")
    assert (list(second.device_view.visible_devices), second.device_view.mps_client) == ([*stub_devices], False)


def test_a_member_reads_what_the_leader_has_written(
    open_harbor: Connect, start_fake: StartFake, make_vmm: MakeArena
) -> None:
    """C13: vmm memory can be mapped for reading only."""
    leader = open_harbor(start_fake(make_vmm).target)
    pool = leader.open_pool("p", LAYOUT)
    member = open_harbor(leader._link.address.target, join=leader.join_token, rank=1, read_only=True)
    memory = member.attach_pool(pool.id)
    write(pool.memory.mapping, b"for all")
    assert read(memory.mapping, 7) == b"for all"
    assert not memory.mapping.writable


def test_ipc_memory_cannot_be_mapped_for_reading_only(
    open_harbor: Connect, start_fake: StartFake, make_ipc: MakeArena
) -> None:
    """C13: the guard does not exist there, and a member that asks for it is told so."""
    leader = open_harbor(start_fake(make_ipc).target)
    pool = leader.open_pool("p", LAYOUT)
    member = open_harbor(leader._link.address.target, join=leader.join_token, rank=1, read_only=True)
    with pytest.raises(StateRefused, match="cannot map read-only") as error:
        member.attach_pool(pool.id)
    assert error.value.reason == "ARENA_UNFIT"


def test_a_device_that_is_not_seen_here_is_refused(open_harbor: Connect, start_fake: StartFake, make_vmm: Any) -> None:
    """F5: by the service, which is told what this process sees; it is asked once more, not for ever."""
    service = start_fake(lambda size_bytes, name: Disguised(make_vmm(size_bytes, name), {"device": "GPU-elsewhere"}))
    with pytest.raises(DeviceNotVisible):
        open_harbor(service.target).open_pool("p", LAYOUT)
    assert [attach.HasField("device_view") for attach in service.attaches] == [False, True]


def test_a_client_of_mps_says_so(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death would not prove that its kernels have stopped; the service decides."""
    monkeypatch.setenv("KVSTUB_MPS", "1")
    with connect(service.target) as harbor, pytest.raises(MpsClientRefused):
        harbor.open_pool("p", LAYOUT)


@pytest.mark.parametrize("changes", [{"chunk_bytes": (4096,)}, {"fds": ()}], ids=["odd chunk", "no descriptor"])
def test_memory_that_cannot_be_mapped_has_the_reason(
    open_harbor: Connect, start_fake: StartFake, make_vmm: Any, changes: dict[str, Any]
) -> None:
    """The GpumemError is the cause; no descriptor and no range stays."""
    service = start_fake(lambda size_bytes, name: Disguised(make_vmm(size_bytes, name), changes))
    with pytest.raises(StateRefused) as error:
        open_harbor(service.target).open_pool("p", LAYOUT)
    assert error.value.reason == "ARENA_UNFIT"
    assert isinstance(error.value.__cause__, GpumemError)


def test_a_pid_that_is_the_exporters_is_refused_with_the_remedy(
    open_harbor: Connect, start_fake: StartFake, make_ipc: MakeArena
) -> None:
    """Two containers whose first process has pid 1: the driver would take them for one."""
    service = start_fake(lambda size_bytes, name: Disguised(make_ipc(size_bytes, name), {"exporter_pid": os.getpid()}))
    with pytest.raises(StateRefused, match="shareProcessNamespace") as error:
        open_harbor(service.target).open_pool("p", LAYOUT)
    assert (error.value.reason, error.value.metadata["ownPid"]) == ("IPC_REFUSED", str(os.getpid()))


def test_a_device_that_fails_is_told_with_the_call_that_failed(
    open_harbor: Connect, start_fake: StartFake, make_vmm: MakeArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code and call of the driver are metadata."""
    service = start_fake(make_vmm)
    monkeypatch.setenv("KVSTUB_FAIL", "cuMemSetAccess:1:700")
    with pytest.raises(StateRefused) as error:
        open_harbor(service.target).open_pool("p", LAYOUT)
    assert (error.value.reason, error.value.metadata["call"]) == ("DEVICE_FAILED", "cuMemSetAccess")
    assert error.value.metadata["code"] == "CUDA_ERROR_ILLEGAL_ADDRESS"


WITHOUT_CUDA = """
import sys
from kvharbor.client import StateRefused, connect
from integration.client_worker import LAYOUT

with connect(sys.argv[1]) as harbor:
    try:
        harbor.open_pool("p", LAYOUT)
    except StateRefused as refused:
        print(refused.reason, "remedy" in refused.metadata)
"""


def test_a_process_without_cuda_is_told_what_it_lacks(start_fake: StartFake, make_vmm: MakeArena) -> None:
    """The pool is there, the driver is not."""
    script = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{WITHOUT_CUDA}"]
    done = subprocess.run(
        [*script, start_fake(make_vmm).target], capture_output=True, text=True, timeout=60, check=False, env={}
    )
    assert (done.stdout, done.stderr) == ("CUDA_UNAVAILABLE True\n", "")


def test_a_commit_waits_for_the_device(
    open_harbor: Connect, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C14: without torch for the whole context; when that has failed, nothing is published."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    assert isinstance(pool.order, DeviceOrder)
    held = pool.allocate(range(16))
    monkeypatch.setenv("KVSTUB_FAIL", "cuCtxSynchronize:1:700")
    for call in (lambda: held.commit(16), held.release):
        with pytest.raises(DeviceFailed, match="cuCtxSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
            call()
    assert (service.calls["Commit"], service.calls["Release"]) == ([], [])
    monkeypatch.delenv("KVSTUB_FAIL")
    held.commit(16)
    held.release()
