"""What a client does while its service's process is gone, and when another one comes. The service is a fake."""

import dataclasses
import gc
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_service import DEADLINE_S, FakeService
from integration.client_kinds import KINDS, connector
from integration.client_worker import BLOCK_TOKENS, LAYOUT
from kvharbor.client import (
    CommitBackwards,
    CommitResult,
    CursorOutOfRange,
    DeadlineExceeded,
    ExtraKey,
    Harbor,
    Namespace,
    Pool,
    SequenceInDoubt,
    SequenceLost,
    ServiceAway,
    ServiceUnreachable,
    SessionLost,
    Unavailable,
    connect,
    holdings,
)
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import errors_pb2, types_pb2
from waiting import until

Connect = Callable[..., Any]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    """The fake, with its process running."""
    fake = FakeService(tmp_path, LAYOUT, block_count=64)
    yield fake
    fake.close()


@pytest.fixture(params=KINDS)
def open_harbor(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects with the client under test."""
    with connector(request.param) as start:
        yield start


@pytest.fixture
def pool(service: FakeService) -> Iterator[Pool]:
    """An open pool of the synchronous client."""
    with connect(service.target) as harbor:
        yield harbor.open_pool("p", LAYOUT)


def ids(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def wait_for(event: threading.Event) -> Callable[[], None]:
    """Returns what waits for an event."""

    def wait() -> None:
        event.wait(DEADLINE_S)

    return wait


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
    service.before["Resume"] = lambda: seen.append(_peek(old))
    service.restart()
    assert service.wait_until_resumed().complete
    assert seen == [b"open"]
    until(lambda: _peek(old) == b"")
    assert service.hellos.get_nowait().HasField("resume") is False
    resume = service.hellos.get_nowait().resume
    assert (resume.token, resume.epoch) == ("leader", "e1")


def _peek(connection: Any) -> bytes:
    try:
        return bytes(connection.recv(1))
    except BlockingIOError:
        return b"open"


def test_a_process_that_ends_while_it_is_told_is_followed_by_the_next(service: FakeService, pool: Pool) -> None:
    """Every socket that may be known stays open until a Resume is complete."""
    held = pool.allocate(range(16))
    service.before["Resume"] = _once(service.before, "Resume", service.restart)
    service.restart()
    assert [each.sequence.sequence_id for each in service.wait_until_resumed().sequences] == [held.id]
    until(lambda: held.commit(16) == CommitResult(16))
    held.release()


def _once(hooks: dict[str, Callable[[], None]], method: str, action: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        hooks.pop(method, None)
        action()

    return run


def test_calls_that_need_the_service_wait_for_it(open_harbor: Connect, service: FakeService) -> None:
    """Up to their deadline or `away_wait_s`; the error names how long it has been away."""
    pool = open_harbor(service.target, timeout_s=0.2).open_pool("p", LAYOUT)
    hasty = open_harbor(service.target, away_wait_s=0.0).open_pool("p", LAYOUT)
    held = pool.allocate(range(16))
    service.kill()
    until(lambda: held.commit(0).pending is not False)
    for call in (lambda: pool.allocate(range(3)), lambda: held.extend(16), lambda: held.fork(1), pool.stats):
        with pytest.raises(ServiceAway, match=r"away for 0\.\d+ s"):
            call()
    start_s = time.monotonic()
    with pytest.raises(ServiceAway):
        hasty.stats()
    assert time.monotonic() - start_s < 0.2
    service.begin()
    until(lambda: answered(pool))
    held.release()


def answered(pool: Any) -> bool:
    try:
        pool.stats()
    except Unavailable:
        return False
    return True


def test_a_waiting_call_is_sent_when_the_service_is_back(service: FakeService, pool: Pool) -> None:
    """Nothing was sent before, so it is as if it had been made later."""
    service.kill()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pool.allocate, range(16))
        until(lambda: bool(pool.link._changed._waiters))  # type: ignore[attr-defined]
        service.begin()
        waiting.result(DEADLINE_S).release()
    assert len(service.calls["Allocate"]) == 1


def test_a_commit_under_way_when_the_process_ends_is_taken_in_here(open_harbor: Connect, service: FakeService) -> None:
    """Whether it took effect does not matter: the next process is told how things stand."""
    pool = open_harbor(service.target).open_pool("p", LAYOUT)
    held = pool.allocate(range(16), reserve_tokens=16)
    service.after["Commit"] = _once(service.after, "Commit", service.kill)
    assert held.commit(16, [5]) == CommitResult(0, pending=True)
    assert held.token_count == 17
    service.begin()
    assert pool.stats().sequence_count == 1
    assert service.wait_until_resumed().sequences[0].tail_token_ids == ids(*range(16), 5)
    held.release()


@pytest.mark.parametrize("method", ["Allocate", "Commit", "Extend", "Fork", "Release", "Handoff"])
def test_an_answer_of_a_process_that_has_ended_is_not_taken_in(service: FakeService, pool: Pool, method: str) -> None:
    """The next process has been told how things stood before it, so the same call is sent again and has one effect."""
    held = pool.allocate(range(16), reserve_tokens=16)
    calls: dict[str, Callable[[], Any]] = {
        "Allocate": lambda: pool.allocate(range(4), request_id="again"),
        "Commit": lambda: held.commit(16, [5]),
        "Extend": lambda: held.extend(16),
        "Fork": lambda: held.fork(2),
        "Release": held.release,
        "Handoff": lambda: held.handoff(16),
    }
    service.calls.clear()

    def end_and_come_back() -> None:
        service.blink()
        service.wait_until_resumed()

    service.after[method] = _once(service.after, method, end_and_come_back)
    result = calls[method]()
    first, second = service.calls[method]
    assert first == second
    made = result if isinstance(result, list) else [result] if method == "Allocate" else []
    for sequence in made:
        assert sequence.id in service.sequences
    if method == "Commit":
        assert (held.token_count, service.sequences[held.id].token_count) == (17, 17)
    if method == "Extend":
        assert len(service.sequences[held.id].table.block_ids) // 4 == len(held.table) == 3
    if method == "Release":
        assert held.id not in service.sequences
    for sequence in (*made, held):
        sequence.release()


def test_a_sequence_that_the_next_process_refuses_is_lost(service: FakeService, pool: Pool) -> None:
    """Its next use says why; the others go on; releasing it is quiet."""
    lost, kept = pool.allocate(range(16)), pool.allocate(range(16))
    service.held.refuse_resume[lost.id] = types_pb2.ItemStatus(
        code=9, reason=errors_pb2.ERROR_REASON_STALE_GENERATION, message="stale", metadata={"blockId": "3"}
    )
    service.restart()
    service.wait_until_resumed()
    until(lambda: lost.ended)
    uses: tuple[Callable[[], Any], ...] = (
        lambda: lost.commit(16),
        lambda: lost.extend(1),
        lambda: lost.slots(0, 1),
        lambda: lost.fork(1),
        lambda: lost.handoff(16),
    )
    for use in uses:
        with pytest.raises(SequenceLost, match="STALE_GENERATION: stale") as error:
            use()
        assert (error.value.metadata["cause"], error.value.metadata["blockId"]) == ("STALE_GENERATION", "3")
    lost.release()
    assert kept.commit(16) == CommitResult(16)
    kept.release()


def test_a_batch_goes_on_without_what_was_lost(service: FakeService, pool: Pool) -> None:
    """A sequence that is lost while its commit waits is refused alone."""
    lost, kept = pool.allocate(range(16)), pool.allocate(range(16))
    service.held.refuse_resume[lost.id] = types_pb2.ItemStatus(
        code=9, reason=errors_pb2.ERROR_REASON_STALE_GENERATION, message="stale"
    )

    def end_and_come_back() -> None:
        service.blink()
        service.wait_until_resumed()

    service.after["Commit"] = _once(service.after, "Commit", end_and_come_back)
    refused, done = pool.commit_many([(lost, 16), (kept, 16)])  # type: ignore[list-item]
    assert type(refused) is SequenceLost
    assert done == CommitResult(16)
    kept.release()


def test_a_bad_commit_is_refused_while_the_service_is_away(service: FakeService, pool: Pool) -> None:
    """As the service would: told to the next process it would cost the whole sequence."""
    held = pool.allocate(range(16))
    held.commit(8)
    service.kill()
    until(lambda: held.commit(8).pending)
    with pytest.raises(CommitBackwards):
        held.commit(7)
    for computed_tokens, new_tokens in ((17, ()), (16, range(17))):
        with pytest.raises(CursorOutOfRange):
            held.commit(computed_tokens, new_tokens)
    assert (held.computed_tokens, held.token_count) == (8, 16)
    service.begin()
    service.wait_until_resumed()
    held.release()


@pytest.mark.parametrize("took_effect", [False, True])
def test_a_commit_without_an_answer_is_carried_by_the_next(
    open_harbor: Connect, service: FakeService, took_effect: bool
) -> None:
    """C5: it has not moved token_count, so its tokens are named again; they have one effect, whatever it had."""
    pool = open_harbor(service.target, timeout_s=0.2).open_pool("p", LAYOUT)
    hooks = service.after if took_effect else service.before
    answered = threading.Event()
    held = pool.allocate(range(16), reserve_tokens=16)
    hooks["Commit"] = _once(hooks, "Commit", wait_for(answered))
    with pytest.raises(DeadlineExceeded):
        held.commit(16, [5, 6])
    answered.set()
    assert held.token_count == 16
    uses: list[Callable[[], Any]] = [lambda: held.fork(1), lambda: held.commit(17, [6])]
    for use in uses:
        with pytest.raises(SequenceInDoubt):
            use()
    assert held.commit(19, [5, 6, 7]) == CommitResult(16)
    assert (held.token_count, service.sequences[held.id].token_count) == (19, 19)
    held.release()


def test_a_commit_without_an_answer_may_just_be_repeated(service: FakeService) -> None:
    """C5: the same item, sent once more."""
    answered = threading.Event()
    with connect(service.target, timeout_s=0.2) as harbor:
        held = harbor.open_pool("p", LAYOUT).allocate(range(16), reserve_tokens=16)
        service.after["Commit"] = _once(service.after, "Commit", wait_for(answered))
        with pytest.raises(DeadlineExceeded):
            held.commit(16, [5, 6])
        answered.set()
        assert held.commit(16, [5, 6]) == CommitResult(16)
        first, second = service.calls["Commit"]
        assert first == second
        assert (held.token_count, service.sequences[held.id].token_count) == (18, 18)
        held.release()


def test_a_hand_off_without_an_answer_may_be_repeated_or_released(service: FakeService) -> None:
    """C5: nothing else, as it may be another's already."""
    answered = threading.Event()
    with connect(service.target, timeout_s=0.2) as harbor:
        held = harbor.open_pool("p", LAYOUT).allocate(range(16))
        service.after["Handoff"] = _once(service.after, "Handoff", wait_for(answered))
        with pytest.raises(DeadlineExceeded):
            held.handoff(16)
        answered.set()
        for use in (lambda: held.commit(16), lambda: held.extend(1), lambda: held.fork(1)):
            with pytest.raises(SequenceInDoubt, match="hand it off again"):
                use()
        assert held.handoff(16) == f"token of {held.id}"
        first, second = service.calls["Handoff"]
        assert first == second


def test_a_hand_off_that_took_effect_in_a_process_that_died_has_ended_the_sequence(
    open_harbor: Connect, service: FakeService
) -> None:
    """C5: its token has ended with the process, and the next one has nothing of it to give away; the caller is told."""
    held = open_harbor(service.target).open_pool("p", LAYOUT).allocate(range(20))
    service.held.refuse_resume[held.id] = types_pb2.ItemStatus(
        code=9, reason=errors_pb2.ERROR_REASON_STALE_GENERATION, message="not its own any more"
    )

    def given_and_dead() -> None:
        service.after.clear()
        del service.sequences[held.id]
        service.restart()

    service.after["Handoff"] = given_and_dead
    with pytest.raises(SequenceLost, match="not its own any more"):
        held.handoff(20)
    assert (held.ended, held.leaving) == (True, True)


def test_an_unwarm_under_way_is_not_sent_again(service: FakeService, pool: Pool) -> None:
    """C8: a second one would say that there is no such pin."""
    service.after["Unwarm"] = service.restart
    with pytest.raises(ServiceUnreachable):
        pool.unwarm("x")
    assert len(service.calls["Unwarm"]) == 1


def test_where_nobody_listens_any_more_the_session_is_over(open_harbor: Connect, service: FakeService) -> None:
    """The listener belongs to what keeps the state: there is nothing to wait for. Releases and close are quiet."""
    harbor = open_harbor(service.target)
    pool = harbor.open_pool("p", LAYOUT)
    held = pool.allocate(range(16))
    service.leave()
    for lost in (lambda: pool.allocate(range(3)), pool.stats, harbor.server_info):
        with pytest.raises(SessionLost, match="connect again"):
            lost()
    held.release()
    assert held.ended


def test_a_session_that_the_next_process_does_not_know_is_lost(service: FakeService, pool: Pool) -> None:
    """A refusal that no waiting mends."""
    pool.link.session = _with_token(pool.link.session, "unknown")
    service.restart()
    with pytest.raises(SessionLost):
        until(lambda: pool.stats() is None)


def _with_token(session: Any, token: str) -> Any:
    return dataclasses.replace(session, resume_token=token)


def test_a_forgotten_harbor_ends_its_session(service: FakeService) -> None:
    """The thread that watches the side socket does not keep it alive."""
    harbor: Harbor | None = connect(service.target)
    connection = service.accepted[0]
    connection.setblocking(False)
    assert harbor is not None
    del harbor
    gc.collect()
    until(lambda: _peek(connection) == b"")


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
