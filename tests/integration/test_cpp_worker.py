"""Sequences of the C++ client beside those of the Python client: the API is nobody's alone."""

import signal

import pytest

from cpp_worker import CppError
from integration.client_worker import BLOCK_TOKENS, read, stamp
from integration.cpp_sessions import StartWorker, stamps_of
from kvharbor.client import Engine, EngineReuse, Pool
from service_process import ServiceProcess
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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


def test_a_page_that_is_none_is_refused_with_what_to_do(
    python_pool: Pool, shared_service: ServiceProcess, start_worker: StartWorker
) -> None:
    """The caller's mistake, found before any memory is touched."""
    worker = start_worker(shared_service, python_pool.name)
    for page, told in (
        (("key", 0, 0), "plane is key, must be a plane of the layout: name one of k, v"),
        (("k", 2, 0), "layer is 2, must be in [0, 2): count the plane's layers from 0"),
        (("v", 1, 9), "block is 9, must be in [0, 9): take blocks from a table of this pool"),
    ):
        with pytest.raises(CppError) as mistake:
            worker.peek(*page)
        assert (mistake.value.kind, mistake.value.reason, str(mistake.value)) == (
            "CallerMistake",
            "INVALID_FIELD",
            told,
        )


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
