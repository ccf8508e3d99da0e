"""How the work of a device is waited for [C14]: by torch, by the driver, and not at all where there is neither."""

import subprocess
import sys
from typing import Any

import pytest

from fake_service import FakeService
from kvharbor.client import devices
from kvharbor.client.ordering import DeviceOrder, wait_for
from kvharbor.gpumem import Device


class FakeTorch:
    """torch as far as the order of a device asks it: whether it uses CUDA, a device's current stream, and events."""

    def __init__(self, *, initialized: bool) -> None:
        self.story: list[str] = []
        self.initialized = initialized
        self.cuda = self

    def is_initialized(self) -> bool:
        return self.initialized

    def current_stream(self, ordinal: int) -> "FakeTorch":
        self.story.append(f"stream of {ordinal}")
        return self

    def record_event(self) -> "FakeTorch":
        self.story.append("record")
        return self

    def synchronize(self) -> None:
        self.story.append("synchronize")


DEVICE = Device("GPU-1", ordinal=3, name="stub")


@pytest.mark.parametrize("method", ["before_commit", "before_release"])
def test_the_order_of_a_device_is_that_of_torchs_current_stream(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """An event is recorded at once, so that what is launched later is not waited for."""
    torch = FakeTorch(initialized=True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    wait = getattr(DeviceOrder(DEVICE), method)()
    assert torch.story == ["stream of 3", "record"]
    wait()
    assert torch.story == ["stream of 3", "record", "synchronize"]


@pytest.mark.parametrize("torch", [None, FakeTorch(initialized=False)], ids=["no torch", "torch without CUDA"])
def test_without_torch_the_order_of_a_device_is_that_of_all_its_work(
    monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    """Nobody knows the streams of what else there is."""
    synchronized: list[Device] = []
    monkeypatch.setattr(devices, "synchronize", synchronized.append)
    if torch is None:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "torch", torch)
    wait_for(DeviceOrder(DEVICE).before_commit())
    assert synchronized == [DEVICE]


FORKING = """
import os, sys
from kvharbor.client import HarborClosed, connect
from integration.client_worker import LAYOUT

class Forbidden:
    def before_commit(self):
        raise RuntimeError("the device is the parent's")

    before_release = before_commit

harbor = connect(sys.argv[1])
pool = harbor.open_pool("p", LAYOUT, order=Forbidden())
held = pool.allocate(range(16))
if (child := os.fork()) == 0:
    try:
        held.commit(16)
    except HarborClosed:
        print("closed")
    held.release()
    harbor.close()
    print("ended", held.ended, flush=True)
    os._exit(0)
os.waitpid(child, 0)
try:
    held.commit(16)
except RuntimeError as failure:
    print(failure, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_fork_waits_for_no_device(service: FakeService) -> None:
    """C7: it has no use of the parent's context, and says nothing of its blocks; it ends as quietly as on the host."""
    script = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{FORKING}", service.target]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["closed", "ended True", "the device is the parent's"]


HOST_ONLY = """
import sys
from kvharbor.client import connect
from integration.client_worker import LAYOUT

with connect(sys.argv[1]) as harbor, connect(sys.argv[1], join=harbor.join_token, rank=1) as member:
    pool = harbor.open_pool("p", LAYOUT)
    member.attach_pool(pool.id)
    with pool.allocate(range(16)) as held:
        held.commit(16)
print([name for name in sys.modules if name.split(".")[0] in ("cuda", "cupy", "torch")])
"""


@pytest.mark.slow
def test_who_uses_host_memory_imports_nothing_of_cuda(service: FakeService) -> None:
    """Neither the bindings nor CuPy nor torch, and no device is asked for."""
    script = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{HOST_ONLY}", service.target]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert [attach.HasField("device_view") for attach in service.attaches] == [False, False, False]
