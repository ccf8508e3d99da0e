"""Calls that are given up: before they take effect nothing happens; after it, what nobody can name ends [S2], [S22]."""

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import RawCaller
from waiting import until

BLOCKS = 60_000
PROMPT = array("I", range(BLOCKS * 16)).tobytes()


@pytest.fixture(scope="module")
def path(start_service: StartService) -> str:
    """A service with room for a prompt that takes some hundred slices."""
    return str(start_service(memory="80MiB").socket)


@pytest.fixture
def caller(path: str) -> Iterator[RawCaller]:
    """A session."""
    with RawCaller(path) as session:
        yield session


@pytest.fixture
def watcher(path: str) -> Iterator[RawCaller]:
    """Another one, to look on."""
    with RawCaller(path) as session:
        yield session


def begun(caller: RawCaller, watcher: RawCaller, pool_id: str, **fields: Any) -> Any:
    """Returns an Allocate of all blocks that is under way."""
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=PROMPT, **fields)
    call = caller.cache.Allocate.future(request, metadata=caller.metadata, timeout=30)
    until(lambda: watcher.stats(pool_id), lambda now: now.reserved_block_count > 0)
    return call


def give_up(call: Any) -> None:
    """Cancels a call that has had no answer yet."""
    assert call.cancel()
    assert call.cancelled()


def is_free(watcher: RawCaller, pool_id: str) -> Callable[[], bool]:
    """Tells whether nothing of the pool is held."""
    return lambda: watcher.stats(pool_id).free_block_count == BLOCKS


def test_what_a_cancelled_call_has_made_without_a_name_ends(caller: RawCaller, watcher: RawCaller) -> None:
    """Nobody could release it, or find it again."""
    pool_id = caller.open_pool("given-up", block_count=BLOCKS)
    before = caller.stats(pool_id).counters.allocate_count
    give_up(begun(caller, watcher, pool_id))
    until(is_free(watcher, pool_id), bool)
    assert watcher.stats(pool_id).counters.allocate_count == before + 1


def test_what_has_a_request_id_is_there_for_a_retry(caller: RawCaller, watcher: RawCaller) -> None:
    """The same call again gets it; Release by its request_id ends it."""
    pool_id = caller.open_pool("given-up", block_count=BLOCKS)
    give_up(begun(caller, watcher, pool_id, request_id="r"))
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=PROMPT, request_id="r")
    sequence = caller.call(caller.cache.Allocate, request).sequence
    stats = watcher.stats(pool_id)
    assert (stats.sequence_count, stats.reserved_block_count) == (1, BLOCKS)
    release = cache.ReleaseRequest(pool_id=pool_id, items=[cache.ReleaseItem(request_id="r")])
    assert caller.call(caller.cache.Release, release).results[0].released_sequence_count == 1
    assert sequence.request_id == "r"
    assert is_free(watcher, pool_id)()


def test_a_call_that_is_cancelled_before_its_turn_does_nothing(caller: RawCaller, watcher: RawCaller) -> None:
    """It waited behind a long one of its session."""
    pool_id = caller.open_pool("given-up", block_count=BLOCKS)
    long = begun(caller, watcher, pool_id, request_id="long")
    release = cache.ReleaseRequest(pool_id=pool_id, items=[cache.ReleaseItem(request_id="long")])
    short = caller.cache.Release.future(release, metadata=caller.metadata, timeout=30)
    give_up(short)
    long.result(timeout=30)
    assert watcher.stats(pool_id).sequence_count == 1
    caller.call(caller.cache.Release, release)


def test_a_deadline_is_as_good_as_a_cancellation(caller: RawCaller, watcher: RawCaller) -> None:
    """It passes while the call waits for its turn behind a long one of its session: nothing is held without a name."""
    pool_id = caller.open_pool("given-up", block_count=BLOCKS)
    before = watcher.stats(pool_id).counters.allocate_count
    long = begun(caller, watcher, pool_id, request_id="long")
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=PROMPT[:4])
    with pytest.raises(grpc.RpcError) as failure:
        caller.cache.Allocate(request, metadata=caller.metadata, timeout=0.001)
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    long.result(timeout=30)
    release = cache.ReleaseRequest(pool_id=pool_id, items=[cache.ReleaseItem(request_id="long")])
    # In its session's next turn: after whatever became of the other.
    caller.call(caller.cache.Release, release)
    assert is_free(watcher, pool_id)()
    assert watcher.stats(pool_id).counters.allocate_count == before + 1


def test_waiting_for_room_that_is_given_up_takes_none(caller: RawCaller, watcher: RawCaller) -> None:
    """The room that comes is the next one's."""
    pool_id = caller.open_pool("given-up", block_count=BLOCKS)
    watcher.open_pool("given-up", block_count=BLOCKS)
    all_of_it = cache.AllocateRequest(pool_id=pool_id, token_ids=PROMPT, request_id="all")
    watcher.call(watcher.cache.Allocate, all_of_it)
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=PROMPT[:4])
    request.wait.seconds = 20
    waiting = caller.cache.Allocate.future(request, metadata=caller.metadata, timeout=30)
    until(lambda: watcher.stats(pool_id).waiting_count, lambda count: count == 1)
    give_up(waiting)
    until(lambda: watcher.stats(pool_id).waiting_count, lambda count: count == 0)
    release = cache.ReleaseRequest(pool_id=pool_id, items=[cache.ReleaseItem(request_id="all")])
    watcher.call(watcher.cache.Release, release)
    assert is_free(watcher, pool_id)()
