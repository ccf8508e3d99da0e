"""Case F5: every process numbers the devices that it sees, and only their UUIDs mean the same to all. On the stub."""

import os
from collections.abc import Iterator

import pytest

import cuda_stub
from contract.peer import Peer, Refusal
from kvharbor.gpumem import Export

pytestmark = pytest.mark.slow

SIZE_BYTES = 3 * cuda_stub.GRANULARITY_BYTES
FIRST, SECOND = cuda_stub.new_uuid(), cuda_stub.new_uuid()


def process(visible: str) -> Peer:
    """A process that sees some of the two cards of the machine, in some order."""
    environment = cuda_stub.environment([FIRST, SECOND], visible=visible)
    return Peer.spawned({**environment, "KVHARBOR_CUDA_RUNTIME": "driver"})


@pytest.fixture(params=["cuda_ipc", "cuda_vmm"])
def kind_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def owner() -> Iterator[Peer]:
    """The sidecar, which sees both."""
    with process("0,1") as spawned:
        yield spawned


@pytest.fixture
def export(kind_name: str, owner: Peer) -> Iterator[Export]:
    """Its pool, on the second card; a stamp is written to it by a process that sees both as well."""
    made = owner.create(kind_name, SIZE_BYTES, SECOND)
    with process("0,1") as writer:
        writer.attach(kind_name, made)
        writer.ask("write", 77, b"stamp")
    yield made
    for fd in made.fds:
        os.close(fd)


@pytest.mark.parametrize("visible", ["1", SECOND, "1,0"], ids=["only it", "by UUID", "in reverse order"])
def test_f5_a_worker_finds_the_card_by_its_uuid(visible: str, kind_name: str, export: Export) -> None:
    """F5, workers 1 and 2: the card is number 0 to them and 1 to the sidecar, and they read the stamp."""
    assert export.device == SECOND
    with process(visible) as worker:
        assert worker.attach(kind_name, export) is None
        assert worker.ask("read", 77, 5) == b"stamp"


def test_f5_a_worker_that_does_not_see_the_card_is_told_both_uuids(kind_name: str, export: Export) -> None:
    """F5, worker 3: its number 0 is another card, and is not taken for the pool's."""
    with process("0") as worker:
        refusal = worker.attach(kind_name, export)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.metadata["device"], refusal.metadata["visibleDevices"]) == (
        "DEVICE_NOT_VISIBLE",
        SECOND,
        FIRST,
    )
