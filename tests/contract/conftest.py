"""What every contract test of arenas runs under."""

import os
from collections.abc import Iterator
from typing import cast

import pytest

import cuda_stub
from contract.arena_kinds import KINDS, kinds_where
from contract.crew import Crew
from contract.leaks import no_leaks
from contract.peer import Peer
from kvharbor.gpumem.ipc_runtime import RUNTIME_VARIABLE

__all__ = ["no_leaks"]

_PEERS = ("owner", "peer", "second_peer")


@pytest.fixture(autouse=True)
def _leave_nothing_behind(request: pytest.FixtureRequest) -> None:
    """Every contract test closes what it opens; the peers that it gets are there before it."""
    wanted = [name for name in _PEERS if name in request.fixturenames]
    if wanted:
        request.getfixturevalue("crew").fill(len(wanted))
    if not _on_hardware(request):  # a real driver opens descriptors for itself at its first call
        request.getfixturevalue("no_leaks")


def _on_hardware(request: pytest.FixtureRequest) -> bool:
    return "kind_name" in request.fixturenames and KINDS[request.getfixturevalue("kind_name")].on_hardware


@pytest.fixture
def crew(request: pytest.FixtureRequest) -> Crew:
    """Other processes that have the same devices as this one."""
    if not _on_hardware(request):
        return cast(Crew, request.getfixturevalue("_crew_on_stub"))
    by_cupy = KINDS[request.getfixturevalue("kind_name")].runtime == "cupy"
    return cast(Crew, request.getfixturevalue("_crew_by_cupy" if by_cupy else "_crew_by_driver"))


@pytest.fixture(scope="session")
def _crew_on_stub(stub_devices: tuple[str, str]) -> Iterator[Crew]:
    with Crew({**cuda_stub.environment(stub_devices), RUNTIME_VARIABLE: "driver"}, finds_leaks=True) as made:
        yield made


@pytest.fixture(scope="session")
def _crew_by_driver() -> Iterator[Crew]:
    with Crew({**os.environ, RUNTIME_VARIABLE: "driver"}, finds_leaks=False) as made:
        yield made


@pytest.fixture(scope="session")
def _crew_by_cupy() -> Iterator[Crew]:
    with Crew({**os.environ, RUNTIME_VARIABLE: "cupy"}, finds_leaks=False) as made:
        yield made


@pytest.fixture(params=kinds_where(lambda _: True))
def kind_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One kind of arena; the contract is the same for all."""
    monkeypatch.setenv(RUNTIME_VARIABLE, KINDS[request.param].runtime)
    return str(request.param)


@pytest.fixture
def owner(crew: Crew, _leave_nothing_behind: None) -> Iterator[Peer]:
    """A process that makes arenas."""
    with crew.one() as lent:
        yield lent


@pytest.fixture
def peer(crew: Crew, _leave_nothing_behind: None) -> Iterator[Peer]:
    """Another process, ready to attach to an arena."""
    with crew.one() as lent:
        yield lent


@pytest.fixture
def second_peer(crew: Crew, _leave_nothing_behind: None) -> Iterator[Peer]:
    """One more process."""
    with crew.one() as lent:
        yield lent
