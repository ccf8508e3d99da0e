"""Members of a session, and the options of a connection. The service is a fake."""

from typing import Any

import pytest

from fake_service import DEADLINE_S, FakeService
from integration.client_kinds import Connect
from integration.client_worker import LAYOUT
from kvharbor.client import InvalidField, SessionLost, connect
from waiting import repeat


def test_a_member_maps_what_the_leader_has_opened(open_harbor: Connect, service: FakeService) -> None:
    """C13: views for reading or for both; it goes on with the next process by a token of its own, and tells nothing."""
    leader = open_harbor(service.target)
    pool = leader.open_pool("p", LAYOUT)
    member = open_harbor(service.target, join=leader.join_token, rank=1, read_only=True)
    hellos = [service.hellos.get_nowait() for _ in range(2)]
    join = hellos[1].join
    assert (join.join_token, join.rank, join.mode) == ("join", 1, 2)
    assert (member.session_id, member.join_token) == (leader.session_id, "")
    memory = member.attach_pool(pool.id)
    held = pool.allocate(range(16))
    pool.views.numpy("k", 0)[held.slots(0, 16)] = 3.0
    assert (memory.views.numpy("k", 0)[held.table[0]] == 3.0).all()
    assert not memory.views.numpy("k", 0).flags.writeable
    service.restart()
    assert member.attach_pool(pool.id).pool_id == pool.id
    assert pool.stats().sequence_count == 1
    tokens: set[str] = set()
    while len(tokens) < 2:
        tokens.add(service.hellos.get(timeout=DEADLINE_S).resume.token)
    assert tokens == {"leader", "member"}
    assert len(service.calls["Resume"]) == 1
    held.release()


def test_a_leader_has_no_mapping_that_does_not_follow_epochs(open_harbor: Connect, service: FakeService) -> None:
    """C13: attach_pool is for members; nothing is asked for."""
    leader = open_harbor(service.target)
    pool = leader.open_pool("p", LAYOUT)
    asked = len(service.attaches)
    with pytest.raises(InvalidField, match="take the memory of open_pool") as error:
        leader.attach_pool(pool.id)
    assert (error.value.metadata["field"], len(service.attaches)) == ("join", asked)


def test_a_member_ends_with_the_epoch(service: FakeService) -> None:
    """It joins the leader's new session when the engine tells it how."""
    with connect(service.target) as leader:
        pool = leader.open_pool("p", LAYOUT)
        with connect(service.target, join=leader.join_token, rank=1) as member:
            member.attach_pool(pool.id)
            service.new_epoch()
            with pytest.raises(SessionLost, match="another epoch"):
                repeat(lambda: member.attach_pool(pool.id))


@pytest.mark.parametrize(
    "options",
    [
        {"join": "t"},
        {"rank": 1},
        {"read_only": True},
        {"join": "t", "rank": 1, "on_epoch": print},
        {"join": "t", "rank": 1, "on_moved": print},
        {"away_wait_s": -1.0},
        {"away_wait_s": "soon"},
        {"timeout_s": 0},
    ],
)
def test_options_that_contradict_each_other_are_refused(service: FakeService, options: dict[str, Any]) -> None:
    """Before anything is sent."""
    with pytest.raises(InvalidField):
        connect(service.target, **options)
    assert service.hellos.empty()
