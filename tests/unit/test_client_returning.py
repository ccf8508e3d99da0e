"""What a client tells the next process of its service: how things stand then, and of nothing that is over."""

import threading
from array import array

import numpy as np
import pytest

from fake_process import peek
from fake_service import DEADLINE_S, FakeService
from integration.client_kinds import Connect
from integration.client_worker import BLOCK_TOKENS, LAYOUT
from kvharbor.client import (
    CommitResult,
    DeadlineExceeded,
    ExtraKey,
    Namespace,
    Pool,
    SequenceInDoubt,
    ServiceAway,
    connect,
    holdings,
)
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import types_pb2
from moments import answered, halt, hurried, once, wait_for
from waiting import until


def ids(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def test_commits_and_releases_go_on_while_the_service_is_away(open_harbor: Connect, service: FakeService) -> None:
    """C11: they return at once; the next process is told how things stand then, and of nothing that was released."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    kept = pool.allocate(range(20), reserve_tokens=30, request_id="r", group="g")
    gone = pool.allocate(range(40))
    assert kept.commit(18) == CommitResult(16)
    service.kill()
    assert kept.commit(20, [100, 101]) == CommitResult(16, pending=True)
    assert kept.commit(22, [102]) == CommitResult(16, pending=True)
    assert (kept.computed_tokens, kept.token_count) == (22, 23)
    gone.release()
    service.begin()
    assert pool.stats().sequence_count == 1
    (held,) = service.wait_until_resumed().sequences
    assert held.tail_token_ids == ids(16, 17, 18, 19, 100, 101, 102)
    assert (held.committed_tokens, held.sequence.computed_tokens, held.sequence.token_count) == (16, 22, 23)
    assert (held.sequence.sequence_id, held.sequence.request_id, held.sequence.group) == (kept.id, "r", "g")
    assert np.frombuffer(held.sequence.table.block_ids, "<u4").tolist() == kept.table.tolist()
    assert kept.commit(23) == CommitResult(16)
    kept.release()
    assert service.sequences == {}


@pytest.mark.parametrize("hook", ["before", "after"])
def test_a_commit_under_way_is_told_as_taken(open_harbor: Connect, service: FakeService, hook: str) -> None:
    """C11: it may have taken effect, and less than the ledger has is not taken up. It is sent again."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    held = pool.allocate(range(20), reserve_tokens=30)
    told: list[cache.ResumeRequest] = []

    def end_and_come_back() -> None:
        service.blink()
        told.append(service.wait_until_resumed())

    once(getattr(service, hook), "Commit", end_and_come_back)
    assert held.commit(33, range(20, 35)) == CommitResult(32)
    first, second = service.calls["Commit"]
    assert first == second
    (sequence,) = told[0].sequences
    assert (sequence.sequence.computed_tokens, sequence.sequence.token_count) == (33, 35)
    assert (sequence.committed_tokens, sequence.tail_token_ids) == (0, ids(*range(35)))
    assert (held.computed_tokens, held.token_count, service.sequences[held.id].token_count) == (33, 35, 35)
    service.restart()
    until(lambda: answered(pool))
    (sequence,) = service.wait_until_resumed().sequences
    assert (sequence.committed_tokens, sequence.tail_token_ids) == (32, ids(32, 33, 34))
    held.release()


@pytest.mark.parametrize("hook", ["before", "after"])
def test_a_commit_without_an_answer_is_told_as_taken(open_harbor: Connect, service: FakeService, hook: str) -> None:
    """C5, C11: here it has moved nothing; the next one carries it, whichever process has taken it."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    held = pool.allocate(range(20), reserve_tokens=30)
    failed = threading.Event()
    once(getattr(service, hook), "Commit", wait_for(failed))
    with hurried(pool), pytest.raises(DeadlineExceeded):
        held.commit(33, range(20, 35))
    service.restart()
    failed.set()
    until(lambda: answered(pool))
    (sequence,) = service.wait_until_resumed().sequences
    assert (sequence.sequence.computed_tokens, sequence.sequence.token_count) == (33, 35)
    assert (held.computed_tokens, held.token_count) == (0, 20)
    with pytest.raises(SequenceInDoubt):
        held.fork(1)
    assert held.commit(36, range(20, 37)) == CommitResult(32)
    assert (held.computed_tokens, held.token_count, service.sequences[held.id].token_count) == (36, 37, 37)
    held.release()


def test_a_commit_that_was_never_sent_leaves_no_doubt(service: FakeService) -> None:
    """C5: while the next process is told how things stand, a commit may wait in vain."""
    telling, given_up = threading.Event(), threading.Event()
    with connect(service.target, away_wait_s=0.1) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        held = pool.allocate(range(20))
        once(service.before, "Resume", halt(telling, given_up))
        service.restart()
        assert telling.wait(DEADLINE_S)
        with pytest.raises(ServiceAway):
            held.commit(16)
        given_up.set()
        until(lambda: answered(pool))
        (child,) = held.fork(1)
        child.release()
        held.release()


def test_a_commit_before_a_release_is_told_too(open_harbor: Connect, service: FakeService) -> None:
    """C11: what was computed while the service was away is published before its sequence is released."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    first, second, bare = (pool.allocate(range(40), group="g") for _ in range(3))
    service.kill()
    assert first.commit(40).pending
    assert second.commit(20).pending
    first.release()
    assert pool.release(group="g") == 2
    service.begin()
    assert pool.stats().sequence_count == 0
    told = service.wait_until_resumed().sequences
    assert [(held.sequence.sequence_id, held.sequence.computed_tokens) for held in told] == [
        (first.id, 40),
        (second.id, 20),
    ]
    assert {item.sequence_id for item in service.calls["Release"][-1].items} == {first.id, second.id}
    assert bare.ended
    service.restart()
    assert pool.stats().sequence_count == 0
    assert list(service.wait_until_resumed().sequences) == []


def test_what_a_resumed_sequence_is_told_with(service: FakeService, pool: Pool) -> None:
    """Namespace, and the extra keys of the tokens that are in no committed block: from allocate and from commits."""
    space = Namespace("v1", "lora", b"salt")
    first, second, third = (ExtraKey(offset, bytes([offset])) for offset in (3, 18, 20))
    held = pool.allocate(range(20), reserve_tokens=20, namespace=space, extra_keys=[first, second])
    held.commit(17, [5], extra_keys=[third])
    service.restart()
    (told,) = service.wait_until_resumed().sequences
    assert told.namespace == types_pb2.NamespaceKey(version="v1", adapter="lora", salt=b"salt")
    assert [(key.token_offset, key.value) for key in told.extra_keys] == [(18, b"\x12"), (20, b"\x14")]
    held.release()


def test_children_and_adopted_sequences_are_told_of_too(service: FakeService, pool: Pool) -> None:
    """A child shares its parent's committed blocks and has its own tail; an adopter got the tail with the sequence."""
    parent = pool.allocate(range(40))
    parent.commit(20)
    (child,) = parent.fork(1)
    child.commit(child.computed_tokens, [7])
    adopted = pool.adopt(parent.handoff(20))
    service.restart()
    told = {held.sequence.sequence_id: held for held in service.wait_until_resumed().sequences}
    assert told[child.id].tail_token_ids == ids(*range(16, 40), 7)
    assert told[child.id].committed_tokens == 16
    assert len(told[adopted.id].tail_token_ids) == 4 * 40
    for sequence in (child, adopted):
        sequence.release()


def test_an_idle_worker_comes_back(service: FakeService, pool: Pool) -> None:
    """The side socket is watched: no call is needed, and the old socket is closed only after the last Resume."""
    old = service.accepted[0]
    seen: list[bytes] = []
    old.setblocking(False)
    service.before["Resume"] = lambda: seen.append(peek(old))
    service.restart()
    assert service.wait_until_resumed().complete
    assert seen == [b"open"]
    until(lambda: peek(old) == b"")
    assert service.hellos.get_nowait().HasField("resume") is False
    resume = service.hellos.get_nowait().resume
    assert (resume.token, resume.epoch) == ("leader", "e1")


def test_a_process_that_ends_while_it_is_told_is_followed_by_the_next(service: FakeService, pool: Pool) -> None:
    """Every socket that may be known stays open until a Resume is complete."""
    held = pool.allocate(range(16))
    once(service.before, "Resume", service.restart)
    service.restart()
    assert [each.sequence.sequence_id for each in service.wait_until_resumed().sequences] == [held.id]
    until(lambda: held.commit(16) == CommitResult(16))
    held.release()


@pytest.mark.parametrize(("limit", "most"), [("BATCH_BYTES", 400), ("BATCH_ITEMS", 3)])
def test_many_sequences_are_told_in_several_calls(
    service: FakeService, pool: Pool, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    """Each below the limits of a message and of a call; the last one says that it is."""
    monkeypatch.setattr(holdings, limit, most)
    held = [pool.allocate(range(BLOCK_TOKENS)) for _ in range(10)]
    service.restart()
    service.wait_until_resumed()
    calls = service.calls["Resume"]
    assert [call.complete for call in calls] == [False] * (len(calls) - 1) + [True]
    assert len(calls) > 3
    told = [each.sequence.sequence_id for call in calls for each in call.sequences]
    assert sorted(told) == sorted(sequence.id for sequence in held)
    pool.release(group="")
    for sequence in held:
        sequence.release()


def test_many_that_were_released_meanwhile_are_released_in_several_calls(
    service: FakeService, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the service has learned of their last commits; a call takes so many items."""
    monkeypatch.setattr(holdings, "BATCH_ITEMS", 3)
    held = [pool.allocate(range(BLOCK_TOKENS)) for _ in range(10)]
    service.kill()
    for sequence in held:
        sequence.commit(BLOCK_TOKENS)
        sequence.release()
    service.begin()
    until(lambda: pool.stats() is not None)
    calls = service.calls["Release"]
    assert [len(call.items) for call in calls] == [3, 3, 3, 1]
    assert {item.sequence_id for call in calls for item in call.items} == {sequence.id for sequence in held}


def test_switched_shadows_are_in_the_table_that_is_told(service: FakeService, pool: Pool) -> None:
    """The next process sees the canonical block in the shadow's place; nothing is reported twice."""
    held = pool.allocate(range(32))
    item = held.commit_item(16, ())
    shadow = cache.Shadow(position=0, block_id=40, generation=9)
    held.committed(item, cache.CommitResult(committed_tokens=16, shadows=[shadow]))
    service.kill()
    assert held.switch_shadows() == (0,)
    service.begin()
    (told,) = service.wait_until_resumed().sequences
    assert np.frombuffer(told.sequence.table.block_ids, "<u4").tolist() == [40, held.table[1]]
    until(lambda: not held.commit(16).pending)
    assert list(service.calls["Commit"][-1].items[0].switched_positions) == []
    held.release()
