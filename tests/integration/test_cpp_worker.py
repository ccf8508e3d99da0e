"""The C++ client at work beside the Python client: the API is nobody's alone."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpp_worker import CppError, CppWorker
from integration.client_worker import BLOCK_TOKENS, LAYOUT, pool_size, read, stamp
from kvharbor.client import Engine, EngineReuse, InvalidField, Pool, connect
from service_process import ServiceProcess
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MODEL = LAYOUT.model
StartWorker = Callable[..., CppWorker]


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    """Starts C++ workers with a session, and the memory of a pool if it is named."""
    started: list[CppWorker] = []

    def start(service: ServiceProcess, pool_name: str = "", block_count: int = 8, timeout_s: float = 10.0) -> CppWorker:
        started.append(CppWorker.connected(service.socket, timeout_s=timeout_s))
        if pool_name:
            started[-1].open(pool_name, MODEL, 1, pool_size(block_count))
            started[-1].attach(0)
        return started[-1]

    yield start
    for worker in started:
        worker.discard()


@pytest.fixture
def python_pool(shared_service: ServiceProcess, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A pool of the Python client, of the test's own name and eight blocks."""
    with connect(shared_service.target) as harbor:
        yield harbor.open_pool(request.node.name[:64], LAYOUT, pool_size(8))


def stamps_of(tokens: list[int]) -> list[int]:
    """What is written for each token: whole numbers that float32 holds exactly."""
    return [token * 31 % 9973 + place for place, token in enumerate(tokens)]


def test_python_reads_what_cpp_has_written(
    python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker
) -> None:
    """Every element of every plane and layer, the blocks found as a hit."""
    tokens = list(range(1000, 1040))
    worker = start_worker(shared_service, python_pool.name)
    worker.allocate("a", 0, 0, *tokens)
    worker.stamp("a", 0, *stamps_of(tokens))
    assert worker.commit("a", 40) == 32
    worker.release("a")
    with python_pool.allocate(tokens) as held:
        assert held.cached_tokens == 32
        assert read(python_pool, held, 0, 32) == stamps_of(tokens)[:32]


def test_stats_name_a_cpp_engine_and_what_is_reused_of_it(
    python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker
) -> None:
    """[U1] [U2] By what it says of itself, and by its client_name where it names no instance."""
    worker = start_worker(shared_service, python_pool.name)
    worker.allocate("a", 0, 0, *range(3000, 3040))
    worker.commit("a", 40)
    with python_pool.allocate(range(3000, 3040)):
        engines = python_pool.stats().engines
    (place,) = [place for place, one in enumerate(engines) if one.engine == Engine("driven", "1.0", "driven-cpp")]
    assert engines[place].committed_block_count == 2
    assert [one.reuses for one in engines if one.engine.name == "kvharbor-python"] == [(EngineReuse(place, 32),)]


def test_cpp_reads_what_python_has_written(
    python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker
) -> None:
    """The reverse, beside what it writes itself behind it; generated tokens are found by both."""
    tokens = list(range(2000, 2040))
    with python_pool.allocate(tokens) as held:
        stamp(python_pool, held, 0, stamps_of(tokens))
        held.commit(40)
    worker = start_worker(shared_service, python_pool.name)
    assert worker.allocate("a", 0, 0, *tokens)["cached_tokens"] == 32
    assert worker.read("a", 0, 32) == stamps_of(tokens)[:32]
    assert worker.extend("a", 16)["capacity_tokens"] == 64
    known = [*tokens, *range(50, 60)]
    worker.stamp("a", 32, *stamps_of(known)[32:])
    assert worker.commit("a", 50, *known[40:]) == 48
    shown = worker.show("a")
    assert (shown["computed_tokens"], shown["token_count"], len(shown["table"])) == (50, 50, 4)
    assert worker.lookup(*known) == 48
    with python_pool.allocate(known) as held:
        assert held.cached_tokens == 48
        assert read(python_pool, held, 0, 48) == stamps_of(known)[:48]
    assert worker.read("a", 0, 50) == stamps_of(known)


def test_full_is_a_typed_error_with_its_numbers(
    python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker
) -> None:
    """Metadata and delay of the refusal come through gRPC's details and through an item of a batch."""
    worker = start_worker(shared_service, python_pool.name)
    worker.allocate("a", 0, 0, *range(6 * BLOCK_TOKENS))
    worker.allocate("c", 0, 0, 7, 7, 7)
    with pytest.raises(CppError, match="block") as full:
        worker.allocate("b", 0, 0, *range(500, 500 + 2 * BLOCK_TOKENS))
    assert (full.value.kind, full.value.reason) == ("PoolExhausted", "POOL_EXHAUSTED")
    assert (full.value.metadata["neededBlockCount"], full.value.metadata["freeBlockCount"]) == ("2", "1")
    assert full.value.retry_after_ms is not None
    with pytest.raises(CppError) as full:
        worker.extend("a", 2 * BLOCK_TOKENS)
    assert (full.value.kind, full.value.metadata["freeBlockCount"]) == ("PoolExhausted", "1")
    with pytest.raises(CppError) as mistake:
        worker.allocate("b", 0, 0, *range(9 * BLOCK_TOKENS))
    assert (mistake.value.kind, mistake.value.reason) == ("CallerMistake", "REQUEST_TOO_LARGE")


def test_a_wait_for_room_ends_when_there_is_some(
    python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker
) -> None:
    """`wait` is time beside the timeout, and the first to come is served."""
    worker = start_worker(shared_service, python_pool.name, timeout_s=1.0)
    held = python_pool.allocate(range(8 * BLOCK_TOKENS))
    worker.begin("allocate", "a", 0, 20_000, 1, 2, 3)
    until(lambda: python_pool.stats().waiting_count)
    held.release()
    assert worker.answer()["token_count"] == 3


def test_another_layout_is_refused_with_what_differs(
    python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker
) -> None:
    """One key a differing field."""
    worker = start_worker(shared_service)
    with pytest.raises(CppError) as refusal:
        worker.open(python_pool.name, "another@1", 1, 0)
    assert refusal.value.kind == "LayoutMismatch"
    assert list(refusal.value.metadata) == ["model"]
    assert "another@1" in refusal.value.metadata["model"]


def test_a_killed_worker_leaves_what_it_has_committed(
    python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker
) -> None:
    """G3: kill -9 frees the rest, without anybody's doing."""
    worker = start_worker(shared_service, python_pool.name)
    worker.allocate("a", 0, 0, *range(3000, 3032))
    worker.commit("a", 16)
    stats = python_pool.stats()
    assert (stats.free_block_count, stats.active_block_count, stats.sequence_count) == (6, 1, 1)
    worker.kill()
    until(lambda: python_pool.stats().free_block_count == 7)
    assert python_pool.stats().sequence_count == 0
    assert python_pool.lookup(range(3000, 3032)).present_tokens == 16


def test_destructors_end_what_they_stand_for(
    python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker
) -> None:
    """A sequence's releases it, a harbor's ends the session; neither throws, whichever is first."""
    worker = start_worker(shared_service, python_pool.name)
    for name, first in (("a", 0), ("b", 100)):
        worker.allocate(name, 0, 0, *range(first, first + 16))
    worker.release("a")
    assert python_pool.stats().sequence_count == 1
    worker.close()
    assert python_pool.stats().sequence_count == 0
    with pytest.raises(CppError) as closed:
        worker.show("b")
    assert (closed.value.kind, closed.value.reason) == ("SessionGone", "HARBOR_CLOSED")
    assert worker.end() == 0
    assert python_pool.stats().free_block_count == 8


def test_sequences_are_handed_from_one_language_to_the_other(
    python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker
) -> None:
    """With their partial tails, both ways, and a fork between."""
    tokens = list(range(4000, 4020))
    worker = start_worker(shared_service, python_pool.name)
    worker.allocate("a", 0, 0, *tokens)
    worker.stamp("a", 0, *stamps_of(tokens))
    with python_pool.adopt(worker.handoff("a", 20)) as held:
        assert read(python_pool, held, 0, 20) == stamps_of(tokens)
        held.extend(BLOCK_TOKENS)
        given = held.handoff(20)
    assert worker.adopt("b", given)["computed_tokens"] == 20
    child = worker.fork("b", "c")
    assert (child["computed_tokens"], child["table"][0]) == (20, worker.show("b")["table"][0])
    assert worker.read("c", 0, 20) == stamps_of(tokens)
    with pytest.raises(CppError) as gone:
        worker.adopt("d", given)
    assert (gone.value.kind, gone.value.reason) == ("Gone", "HANDOFF_NOT_FOUND")


def test_a_shadow_is_switched_for_the_block_that_was_first(
    python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker
) -> None:
    """The table names the canonical block then, and the own one is free again."""
    tokens = range(5000, 5016)
    worker = start_worker(shared_service, python_pool.name)
    worker.allocate("a", 0, 0, *tokens)
    with python_pool.allocate(tokens) as first:
        first.commit(16)
        worker.commit("a", 16)
        assert worker.show("a")["shadows"] == 1
        free_before = python_pool.stats().free_block_count
        assert worker.switch("a") == [0]
        assert worker.show("a")["table"] == first.table.tolist()
        assert python_pool.stats().free_block_count == free_before + 1


def test_a_pin_keeps_a_prefix(python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker) -> None:
    """And lets it go."""
    worker = start_worker(shared_service, python_pool.name)
    worker.allocate("a", 0, 0, *range(6000, 6016))
    worker.commit("a", 16)
    assert worker.pin("cpp-pin", *range(6000, 6016)) == 16
    worker.release("a")
    assert worker.stats()["warm"] == 1
    worker.unpin("cpp-pin")
    with pytest.raises(CppError) as gone:
        worker.unpin("cpp-pin")
    assert (gone.value.kind, gone.value.reason) == ("Gone", "PIN_NOT_FOUND")


def test_a_forked_child_has_neither_session_nor_memory(
    python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker
) -> None:
    """C7: its calls throw, its destructors touch nothing, and the parent goes on."""
    worker = start_worker(shared_service, python_pool.name)
    worker.allocate("a", 0, 0, *range(16))
    assert worker.in_child() == 0
    assert worker.touch_in_child() == signal.SIGSEGV
    assert worker.commit("a", 16) == 16


def test_members_of_a_session_share_it_across_languages(service: ServiceProcess, start_worker: StartWorker) -> None:
    """C13: a reader of the other language, on both sides; what it has been given is read-only and it makes no calls."""
    with connect(service.target) as leader, CppWorker() as member:
        pool = leader.open_pool("p", LAYOUT, pool_size(8))
        held = pool.allocate(range(16))
        stamp(pool, held, 0, [7.0] * 16)
        assert member.join(service.socket, 5000, leader.join_token, 1, 1) == leader.session_id
        member.attach_pool(pool.id, 0)
        assert member.peek("k", 1, int(held.table[0])) == 7.0
        with pytest.raises(CppError, match="reading only"):
            member.fill("k", 0, 0, 1.0)
        with pytest.raises(CppError, match="its leader opens the pool") as refusal:
            member.open("p", MODEL, 1, 0)
        assert refusal.value.reason == "SESSION_REQUIRED"
        service.restart_child()
        member.attach_pool(pool.id, 0)
        assert pool.stats().sequence_count == 1
    leader_worker = start_worker(service)
    opened = leader_worker.call("open", "q", MODEL, 1, pool_size(8))
    join_token = leader_worker.joining()
    with connect(service.target, join=join_token, rank=1, read_only=True) as reader:
        leader_worker.attach(0)
        leader_worker.fill("v", 1, 3, 5.0)
        assert (reader.attach_pool(opened["pool_id"]).views.numpy("v", 1)[3] == 5.0).all()


def test_each_rank_maps_its_own_part(service: ServiceProcess, start_worker: StartWorker) -> None:
    """The same block is other bytes in each part; a part that is not there is refused, named or by the rank."""
    leader = start_worker(service)
    opened = leader.call("open", "tp", MODEL, 2, pool_size(8))
    with (
        CppWorker() as member,
        CppWorker() as beyond,
        connect(service.target, join=leader.joining(), rank=3, read_only=True) as reader,
    ):
        member.join(service.socket, 5000, leader.joining(), 1, 0)
        beyond.join(service.socket, 5000, leader.joining(), 2, 0)
        for worker, part in ((leader, 0), (member, 1)):
            assert worker.attach_pool(opened["pool_id"]) == part
            worker.fill("k", 0, 2, 10.0 + part)
        for worker, part in ((leader, 0), (member, 1)):
            assert worker.peek("k", 0, 2) == 10.0 + part
        assert (reader.attach_pool(opened["pool_id"], part=1).views.numpy("k", 0)[2] == 11.0).all()
        assert reader.attach_pool(opened["pool_id"], part=0).part == 0
        for worker, named in ((member, (2,)), (beyond, ())):
            with pytest.raises(CppError, match="part is 2, must be 0 to 1, the ranks of the pool's layout") as refusal:
                worker.attach_pool(opened["pool_id"], *named)
            assert (refusal.value.kind, refusal.value.metadata["field"]) == ("CallerMistake", "part")
        with pytest.raises(InvalidField, match="part is 3, must be 0 to 1, the ranks of the pool's layout"):
            reader.attach_pool(opened["pool_id"])


def test_members_of_an_engine_that_is_not_tensor_parallel_share_its_one_part(
    service: ServiceProcess, start_worker: StartWorker
) -> None:
    """Without a part named, each maps part 0. The leader is told which one of them has gone."""
    leader = start_worker(service, "p")
    pool_id = leader.call("open", "p", MODEL, 1, 0)["pool_id"]
    with CppWorker() as member:
        member.join(service.socket, 5000, leader.joining(), 5, 0)
        assert member.attach_pool(pool_id) == 0
        member.fill("k", 0, 2, 5.0)
    assert leader.peek("k", 0, 2) == 5.0
    lost = until(lambda: failure_of(leader.stats))
    assert lost is not None
    assert (lost.kind, lost.reason) == ("SessionGone", "SESSION_UNKNOWN")
    assert f"the member of rank 5 (pid {member.process.pid}) has gone" in lost.metadata["cause"]


def failure_of(call: Callable[[], object]) -> CppError | None:
    """Returns what a call is refused with; None if it is not."""
    try:
        call()
    except CppError as failure:
        return failure
    return None


def test_a_session_goes_on_with_the_next_process(service: ServiceProcess, start_worker: StartWorker) -> None:
    """G7: what is held is told to it by the next call, whichever that is; a release needs nobody."""
    worker = start_worker(service, "p", block_count=16)
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        worker.allocate(name, 16, 0, *range(first, first + 20))
    worker.stamp("a", 0, *range(20))
    assert worker.commit("a", 20) == 16
    service.restart_child()
    assert worker.commit("a", 32, *range(20, 32)) == 32
    service.restart_child()
    worker.release("b")
    assert worker.stats()["sequences"] == 2
    assert worker.commit("c", 20) == 16
    service.kill_child()
    assert worker.extend("c", 32)["capacity_tokens"] == 80
    assert worker.read("a", 0, 20) == list(range(20))
    worker.release("c")
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", LAYOUT)
        assert pool.stats().sequence_count == 1
        with pool.allocate(range(32)) as held:
            assert read(pool, held, 0, 16) == list(range(16))


def test_threads_share_a_harbor_through_restarts(service: ServiceProcess, start_worker: StartWorker) -> None:
    """C10: no call fails, no byte is wrong, and nothing is held at the end."""
    worker = start_worker(service, "p", block_count=16)
    worker.begin("hammer", 4, 100)
    for _ in range(2):
        service.restart_child()
    assert worker.answer() == 4 * 100 * 32
    stats = worker.stats()
    assert (stats["free"], stats["sequences"]) == (8, 0)


def test_a_service_that_does_not_come_back_is_away(service: ServiceProcess, start_worker: StartWorker) -> None:
    """Calls end in time with what to do; a service without state is another one, and the session is over."""
    worker = start_worker(service, "p", timeout_s=0.3)
    worker.allocate("a", 0, 0, *range(16))
    service.kill()
    with pytest.raises(CppError, match="has been away") as away:
        worker.commit("a", 16)
    assert (away.value.kind, away.value.reason) == ("Unavailable", "SERVICE_AWAY")
    with ServiceProcess(service.socket, "--memory=64MiB") as successor:
        successor.wait_for("ready")
        for _ in range(2):
            with pytest.raises(CppError, match="connect again") as lost:
                worker.commit("a", 16)
            assert lost.value.kind == "SessionGone"
        worker.release("a")
        assert worker.end() == 0
        assert successor.stop() == 0


def test_a_commit_without_an_answer_is_repeated_and_counts_once(
    service: ServiceProcess, start_worker: StartWorker
) -> None:
    """C5: until then the sequence is in doubt, and other tokens are refused."""
    worker = start_worker(service, "p", timeout_s=0.5)
    worker.allocate("a", 32, 0, *range(10))
    worker.commit("a", 10)
    os.kill(service.child_pid, signal.SIGSTOP)
    try:
        with pytest.raises(CppError) as late:
            worker.commit("a", 16, *range(10, 16))
        assert (late.value.kind, late.value.reason) == ("Unavailable", "DEADLINE_EXCEEDED")
        for operation in (("fork", "a", "b"), ("commit", "a", 16, *range(90, 96))):
            with pytest.raises(CppError) as doubt:
                worker.call(*operation)
            assert (doubt.value.kind, doubt.value.reason) == ("StateRefused", "SEQUENCE_IN_DOUBT")
    finally:
        os.kill(service.child_pid, signal.SIGCONT)
    until(lambda: worker.stats()["sequences"] == 1)
    assert worker.commit("a", 20, *range(10, 20)) == 16
    assert worker.show("a")["token_count"] == 20
    assert worker.lookup(*range(20)) == 16


def test_who_cannot_be_reached_is_named(tmp_path: Path) -> None:
    """At once, with the address; an odd one is the caller's mistake."""
    with CppWorker() as worker:
        with pytest.raises(CppError) as nobody:
            worker.connect(tmp_path / "no.sock", 5000)
        assert (nobody.value.kind, nobody.value.reason) == ("Unavailable", "SERVICE_UNREACHABLE")
        assert nobody.value.metadata["address"] == str(tmp_path / "no.side")
        for path in ("relative.sock", f"/{'x' * 120}"):
            with pytest.raises(CppError) as odd:
                worker.connect(path, 5000)
            assert (odd.value.kind, odd.value.metadata["field"]) == ("CallerMistake", "socket_path")
