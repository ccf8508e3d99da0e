"""A pool of several parts: each process maps one, by its rank. The service is a fake, with one arena a rank."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.leaks import mapped_arenas
from fake_service import FakeService
from integration.client_kinds import Connect
from integration.client_worker import LAYOUT
from kvharbor.client import EpochEnded, InvalidField, SessionRequired

PARTED = dataclasses.replace(LAYOUT, tp_size=3)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    """The fake, with its process running."""
    fake = FakeService(tmp_path, PARTED, block_count=8)
    yield fake
    fake.close()


def stamp(memory: Any, value: float) -> None:
    memory.views.numpy("k", 0)[...] = value


def stamps(service: FakeService) -> list[float]:
    """The greatest number in each part, as another process would see it."""
    return [float(np.frombuffer(service.memory(part), np.float32).max()) for part in range(PARTED.tp_size)]


def test_each_rank_maps_its_own_part(open_harbor: Connect, service: FakeService) -> None:
    """The leader part 0, a member that of its rank; all have the same blocks."""
    leader = open_harbor(service.target)
    pool = leader.open_pool("p", PARTED)
    members = [open_harbor(service.target, join=leader.join_token, rank=rank) for rank in (1, 2)]
    memories = [pool, *(member.attach_pool(pool.id) for member in members)]
    assert [memory.part for memory in memories] == [0, 1, 2]
    for value, memory in enumerate(memories, start=1):
        stamp(memory, float(value))
    assert stamps(service) == [1.0, 2.0, 3.0]
    assert [attach.part for attach in service.attaches] == [0, 1, 2]
    with pool.allocate(range(16)) as held:
        assert (members[1].attach_pool(pool.id).views.numpy("k", 0)[held.table] == 3.0).all()


def test_a_part_may_be_named(open_harbor: Connect, service: FakeService) -> None:
    """By an engine whose ranks are not counted as its members are; a member may map several."""
    leader = open_harbor(service.target)
    pool = leader.open_pool("p", PARTED, part=2)
    member = open_harbor(service.target, join=leader.join_token, rank=7)
    for value, memory in enumerate((pool, member.attach_pool(pool.id, part=0), member.attach_pool(pool.id, part=1))):
        stamp(memory, float(value))
    assert stamps(service) == [1.0, 2.0, 0.0]
    assert leader.open_pool("p", PARTED, part=2).part == pool.part == 2


def test_members_of_an_engine_that_is_not_tensor_parallel_share_its_one_part(
    open_harbor: Connect, tmp_path: Path
) -> None:
    """Where tp_size is 1 every rank maps part 0; a part that is named and is not there is refused."""
    with contextlib.closing(FakeService(tmp_path, LAYOUT, block_count=8)) as service:
        leader = open_harbor(service.target)
        pool = leader.open_pool("p", LAYOUT)
        member = open_harbor(service.target, join=leader.join_token, rank=3)
        memory = member.attach_pool(pool.id)
        stamp(memory, 4.0)
        assert memory.part == 0
        assert (pool.views.numpy("k", 0) == 4.0).all()
        with pytest.raises(InvalidField):
            member.attach_pool(pool.id, part=3)


def test_a_rank_beyond_the_parts_is_refused(open_harbor: Connect, service: FakeService) -> None:
    """A rank that is off by one must not write over that of another."""
    leader = open_harbor(service.target)
    pool = leader.open_pool("p", PARTED)
    member = open_harbor(service.target, join=leader.join_token, rank=3)
    mapped = len(mapped_arenas())
    with pytest.raises(InvalidField) as refused:
        member.attach_pool(pool.id)
    assert refused.value.metadata["field"] == "part"
    assert len(mapped_arenas()) == mapped


@pytest.mark.parametrize(("pool_id", "part", "field"), [(99, None, "pool_id"), ("e1.1", "0", "part")])
def test_what_names_no_pool_or_part_is_refused_before_anything_is_sent(
    open_harbor: Connect, service: FakeService, pool_id: Any, part: Any, field: str
) -> None:
    """As any value that a field cannot hold."""
    leader = open_harbor(service.target)
    member = open_harbor(service.target, join=leader.join_token, rank=1)
    with pytest.raises(InvalidField, match=field):
        member.attach_pool(pool_id, part=part)
    assert service.attaches == []


@pytest.mark.parametrize(
    "use",
    [
        lambda member: member.open_pool("p", PARTED),
        lambda member: member.stats(),
        lambda member: member.list_pools(),
    ],
    ids=["open_pool", "stats", "list_pools"],
)
def test_a_member_makes_no_calls(open_harbor: Connect, service: FakeService, use: Callable[[Any], Any]) -> None:
    """C13: it is told so, and what to do, before anything is sent."""
    leader = open_harbor(service.target)
    member = open_harbor(service.target, join=leader.join_token, rank=1)
    with pytest.raises(SessionRequired, match="its leader opens the pool"):
        use(member)
    assert not service.calls


@pytest.mark.parametrize(
    ("join", "rank", "words"),
    [("join", 0, "must be 1 or more with join: rank 0 is the leader's"), ("", 1, "must be 0 without join: give the")],
)
def test_a_rank_and_a_join_token_go_together(
    open_harbor: Connect, service: FakeService, join: str, rank: int, words: str
) -> None:
    """The leader has rank 0 and joins nobody."""
    with pytest.raises(InvalidField, match=words):
        open_harbor(service.target, join=join, rank=rank)


@pytest.mark.parametrize("part", [-1, 3, 1.0, "0"])
def test_a_part_that_the_layout_does_not_have_is_refused_before_anything_is_sent(
    open_harbor: Connect, service: FakeService, part: Any
) -> None:
    """It would be a rank of another engine."""
    with pytest.raises(InvalidField, match="part"):
        open_harbor(service.target).open_pool("p", PARTED, part=part)
    assert service.calls["OpenPool"] == []


def test_a_harbor_has_one_part_of_a_pool(open_harbor: Connect, service: FakeService) -> None:
    """A process that wants two joins its own session: `views` could not show both."""
    leader = open_harbor(service.target)
    pool = leader.open_pool("p", PARTED)
    with pytest.raises(InvalidField, match="join the session once more"):
        leader.open_pool("p", PARTED, part=1)
    again = open_harbor(service.target, join=leader.join_token, rank=1)
    assert again.attach_pool(pool.id).part == 1


def test_devices_go_with_the_call_that_makes_the_pool(open_harbor: Connect, service: FakeService) -> None:
    """One UUID a rank; text would be taken apart into letters."""
    harbor = open_harbor(service.target)
    harbor.open_pool("p", PARTED, devices=("GPU-a", "GPU-b", "GPU-b"))
    assert list(service.calls["OpenPool"][0].devices) == ["GPU-a", "GPU-b", "GPU-b"]
    for devices in ("GPU-a", [7]):
        with pytest.raises(InvalidField, match="devices"):
            harbor.open_pool("p", PARTED, devices=devices)


def test_a_new_epoch_maps_the_same_part_again(open_harbor: Connect, service: FakeService) -> None:
    """C12: views of part 1 show part 1 of the new pool."""
    pool = open_harbor(service.target, on_epoch=lambda *_: None).open_pool("p", PARTED, part=1)
    view = pool.views.numpy("k", 0)
    stamp(pool, 5.0)
    service.new_epoch()
    with contextlib.suppress(EpochEnded):
        pool.stats()
    assert pool.stats().pool_id == "e2.1"
    assert not view.any()
    view[...] = 6.0
    assert stamps(service) == [0.0, 6.0, 0.0]
    assert [attach.part for attach in service.attaches] == [1, 1]
    del view
