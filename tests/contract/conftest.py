"""What every contract test of arenas runs under."""

from collections.abc import Iterator

import pytest

from contract.arena_kinds import KINDS, ArenaKind
from contract.leaks import no_leaks
from contract.peer import Peer

__all__ = ["no_leaks"]


@pytest.fixture(autouse=True)
def _leave_nothing_behind(no_leaks: None) -> None:
    """Every contract test closes what it opens."""


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> ArenaKind:
    """One kind of arena; the contract is the same for all."""
    return KINDS[request.param]


@pytest.fixture
def peer(_leave_nothing_behind: None) -> Iterator[Peer]:
    """Another process, ready to attach to or to own an arena."""
    with Peer.spawned() as spawned:
        yield spawned


@pytest.fixture
def second_peer(_leave_nothing_behind: None) -> Iterator[Peer]:
    """One more process."""
    with Peer.spawned() as spawned:
        yield spawned
