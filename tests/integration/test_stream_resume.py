"""Engines that keep their own tables go on when the service's process is replaced: what they name is theirs."""

import pytest

from kvharbor.v1 import blocks_pb2, errors_pb2, pool_service_pb2, types_pb2
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import RawCaller, Refused
from raw_stream import RawStream, block_tokens, chain, committing, count, first, joined, last, leasing, releasing
from service_process import ServiceProcess
from session_worker import SessionWorker
from waiting import until

BLOCK_COUNT = 16


def resume(caller: RawCaller, pool_id: str, *tables: types_pb2.BlockTable, **fields: object) -> cache.ResumeResponse:
    """Goes on with the session, which holds these blocks, on a new side socket."""
    caller.resume()
    request = cache.ResumeRequest(pool_id=pool_id, blocks=joined(*tables), complete=True, **fields)  # type: ignore[arg-type]
    response: cache.ResumeResponse = caller.call(caller.cache.Resume, request)
    return response


def test_an_engine_goes_on_with_what_it_leased_and_held(service: ServiceProcess) -> None:
    """Unnamed blocks are given back, named ones are as they were, and a commit that had no answer is sent again."""
    with RawCaller(str(service.socket)) as caller, RawCaller(str(service.socket)) as other:
        pool_id = caller.open_pool("p", block_count=BLOCK_COUNT)
        other.open_pool("p", block_count=BLOCK_COUNT)
        with RawStream(caller) as stream:
            (room,) = stream.acquire(pool_id, chain(1, 2, 3, 4, table_block_count=8))
            stream.ask(commit_blocks=committing(pool_id, first(room.leased, 2), 1, 2))
            stream.lease(pool_id, 3)
            service.restart_child()
            failure = stream.ended()
            assert failure is not None
            assert failure.code().name == "UNAVAILABLE"
        caller.resume()
        with RawStream(caller) as stream:
            answer = stream.acquire(pool_id, chain(1, 2))
            assert answer.reason == errors_pb2.ERROR_REASON_RESUME_REQUIRED
        gone = types_pb2.BlockTable(block_ids=b"\x01\x00\x00\x00", generations=b"\xff" * 8)
        response = resume(caller, pool_id, room.leased, gone)
        assert response.lost == gone
        assert response.released_block_count == 3
        other.resume()
        other.resume_pool(pool_id)
        with RawStream(caller) as stream:
            parent = first(last(room.leased, 7))
            third = first(last(room.leased, 6))
            answer = stream.ask(commit_blocks=committing(pool_id, third, 3, parent=parent))
            assert answer.results[0].status.code == 0
            again = stream.ask(commit_blocks=committing(pool_id, first(room.leased, 3), 1, 2, 3))
            assert again.results[0].status.code == 0
            (found_again,) = stream.acquire(pool_id, chain(1, 2, 3))
            assert found_again.held == first(room.leased, 3)
            assert caller.stats(pool_id).reserved_block_count == 5
            assert stream.ask(release_blocks=releasing(pool_id, room.leased)).released_block_count == 8
        stats = caller.stats(pool_id)
        assert (stats.free_block_count, stats.cached_block_count) == (BLOCK_COUNT - 3, 3)


def test_a_session_is_at_its_version_again(service: ServiceProcess) -> None:
    """It says so itself."""
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p", block_count=BLOCK_COUNT)
        with RawStream(caller) as stream:
            version = stream.ask(bump_namespace=blocks_pb2.BumpNamespaceRequest(pool_id=pool_id)).version
            (room,) = stream.acquire(pool_id, chain(1, table_block_count=1))
            stream.ask(commit_blocks=committing(pool_id, room.leased, 1))
        service.restart_child()
        resume(caller, pool_id, room.leased, version=version)
        with RawStream(caller) as stream:
            (found,) = stream.acquire(pool_id, chain(1))
            assert found.held == room.leased
            allocate = cache.AllocateRequest(pool_id=pool_id, token_ids=block_tokens(1, 2))
            assert stream.ask(allocate=allocate).sequence.cached_tokens == 16


def test_a_late_repeat_of_resume_undoes_no_bump(service: ServiceProcess) -> None:
    """The version counts only until the session has resumed."""
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p", block_count=BLOCK_COUNT)
        service.restart_child()
        resume(caller, pool_id, version="before")
        with RawStream(caller) as stream:
            stream.ask(bump_namespace=blocks_pb2.BumpNamespaceRequest(pool_id=pool_id, version="after"))
            caller.call(caller.cache.Resume, cache.ResumeRequest(pool_id=pool_id, complete=True, version="before"))
            (room,) = stream.acquire(pool_id, chain(1, table_block_count=1))
            stream.ask(commit_blocks=committing(pool_id, room.leased, 1))
            named = cache.LookupRequest(
                pool_id=pool_id, token_ids=block_tokens(1, 2), namespace=types_pb2.NamespaceKey(version="after")
            )
            assert caller.call(caller.cache.Lookup, named).present_tokens == 16


def test_the_private_version_of_a_session_ends_with_it(service: ServiceProcess) -> None:
    """Nobody could name it any more; named ones stay, for whoever comes next."""
    with RawCaller(str(service.socket)) as watcher:
        pool_id = watcher.open_pool("p", block_count=BLOCK_COUNT)
        for version, cached_count in (("", 0), ("v1", 1)):
            with RawCaller(str(service.socket)) as caller:
                caller.open_pool("p", block_count=BLOCK_COUNT)
                with RawStream(caller) as stream:
                    bump = blocks_pb2.BumpNamespaceRequest(pool_id=pool_id, version=version)
                    stream.ask(bump_namespace=bump)
                    (room,) = stream.acquire(pool_id, chain(1, table_block_count=1))
                    stream.ask(commit_blocks=committing(pool_id, room.leased, 1))
                    assert count(room.leased) == 1
            assert watcher.stats(pool_id).cached_block_count == cached_count


OWN_VERSION = """
from kvharbor.v1 import blocks_pb2
from raw_stream import RawStream, chain, committing
pool_id = caller.open_pool("p", block_count=16)
stream = RawStream(caller)
stream.ask(bump_namespace=blocks_pb2.BumpNamespaceRequest(pool_id=pool_id))
(room,) = stream.acquire(pool_id, chain(1, table_block_count=1))
stream.ask(commit_blocks=committing(pool_id, room.leased, 1))
result = pool_id
"""


@pytest.mark.parametrize("dies_first", [True, False])
def test_the_private_version_of_a_session_that_dies_before_it_resumes_ends_with_it(
    service: ServiceProcess, dies_first: bool
) -> None:
    """Whether others have said by then at which version they are, or say it later: theirs stay."""
    path = str(service.socket)
    with RawCaller(path) as watcher, RawCaller(path) as other, SessionWorker(path) as worker:
        pool_id = worker.run(OWN_VERSION)
        for caller in (watcher, other):
            caller.open_pool("p", block_count=BLOCK_COUNT)
        with RawStream(other) as stream:
            version = stream.ask(bump_namespace=blocks_pb2.BumpNamespaceRequest(pool_id=pool_id)).version
            (room,) = stream.acquire(pool_id, chain(1, table_block_count=1))
            stream.ask(commit_blocks=committing(pool_id, room.leased, 1))
            stream.ask(release_blocks=releasing(pool_id, room.leased))
        service.restart_child()
        resume(watcher, pool_id)
        if dies_first:
            worker.kill()
            until(lambda: len(_sessions(watcher)), lambda number: number == 2)
            resume(other, pool_id, version=version)
        else:
            resume(other, pool_id, version=version)
            worker.kill()
        until(lambda: watcher.stats(pool_id).free_block_count, lambda number: number == BLOCK_COUNT - 1)
        with RawStream(other) as stream:
            (found,) = stream.acquire(pool_id, chain(1))
            assert found.held == room.leased


def test_a_private_version_that_was_left_before_all_had_resumed_is_freed_when_they_have(
    service: ServiceProcess,
) -> None:
    """Until then another might have been at it."""
    path = str(service.socket)
    with RawCaller(path) as late, RawCaller(path) as mover:
        late.open_pool("p", block_count=BLOCK_COUNT)
        pool_id = mover.open_pool("p", block_count=BLOCK_COUNT)
        with RawStream(mover) as stream:
            version = stream.ask(bump_namespace=blocks_pb2.BumpNamespaceRequest(pool_id=pool_id)).version
            (room,) = stream.acquire(pool_id, chain(1, table_block_count=1))
            stream.ask(commit_blocks=committing(pool_id, room.leased, 1))
            stream.ask(release_blocks=releasing(pool_id, room.leased))
        service.restart_child()
        resume(mover, pool_id, version=version)
        with RawStream(mover) as stream:
            stream.ask(bump_namespace=blocks_pb2.BumpNamespaceRequest(pool_id=pool_id))
        # What the recovery held is cached again only when the last one has resumed.
        assert mover.stats(pool_id).free_block_count == BLOCK_COUNT - 1
        resume(late, pool_id)
        until(lambda: mover.stats(pool_id).free_block_count, lambda number: number == BLOCK_COUNT)


def _sessions(watcher: RawCaller) -> list[pool_service_pb2.SessionInfo]:
    return list(watcher.call(watcher.pools.ListSessions, pool_service_pb2.ListSessionsRequest()).sessions)


def test_a_stream_ends_with_the_service_and_what_is_under_way_is_answered(service: ServiceProcess) -> None:
    """DRAINING; what waits is told that nothing will come of it."""
    with RawCaller(str(service.socket)) as caller, RawStream(caller) as stream:
        pool_id = caller.open_pool("p", block_count=BLOCK_COUNT)
        stream.lease(pool_id, BLOCK_COUNT)
        wait = {"seconds": 20}
        waits = stream.send(lease=leasing(pool_id, 1, wait=wait))
        assert stream.answer(waits).waiting
        assert service.stop() == 0
        assert stream.granted(waits).result.status.code
        failure = stream.ended()
        assert failure is not None
        assert Refused(failure).reason == "DRAINING"
        caller.abandon()
