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
    """Returns an Allocate of all blocks that is under way, or has just ended."""
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=PROMPT, **fields)
    call = caller.cache.Allocate.future(request, metadata=caller.metadata, timeout=30)
    until(lambda: watcher.stats(pool_id), lambda now: now.reserved_block_count > 0)
    return call


def release(caller: RawCaller, pool_id: str, request_id: str) -> int:
    """Ends what has this request_id, in its session's next turn: behind all that was given up before."""
    request = cache.ReleaseRequest(pool_id=pool_id, items=[cache.ReleaseItem(request_id=request_id)])
    return int(caller.call(caller.cache.Release, request).results[0].released_sequence_count)


def is_free(watcher: RawCaller, pool_id: str) -> bool:
    """Tells whether nothing of the pool is held."""
    return bool(watcher.stats(pool_id).free_block_count == BLOCKS)


def sooner_or_later(path: str, watcher: RawCaller, attempt: Callable[[RawCaller, str], bool]) -> None:
    """Makes attempts until one shows its point, each in a session of its own.

    One shows nothing if the service was quicker than who gives up: an answer that has left cannot be taken back.
    """

    def is_shown() -> bool:
        with RawCaller(path) as caller:
            pool_id = caller.open_pool("given-up", block_count=BLOCKS)
            until(lambda: is_free(watcher, pool_id))
            return attempt(caller, pool_id)

    until(is_shown)


def test_what_a_cancelled_call_has_made_without_a_name_ends(path: str, watcher: RawCaller) -> None:
    """Nobody could release it, or find it again."""

    def attempt(caller: RawCaller, pool_id: str) -> bool:
        before = watcher.stats(pool_id).counters.allocate_count
        begun(caller, watcher, pool_id).cancel()
        release(caller, pool_id, "nothing")
        assert watcher.stats(pool_id).counters.allocate_count == before + 1
        return is_free(watcher, pool_id)

    sooner_or_later(path, watcher, attempt)


def test_what_has_a_request_id_is_there_for_a_retry(caller: RawCaller, watcher: RawCaller) -> None:
    """The same call again gets it; Release by its request_id ends it."""
    pool_id = caller.open_pool("given-up", block_count=BLOCKS)
    begun(caller, watcher, pool_id, request_id="r").cancel()
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=PROMPT, request_id="r")
    sequence = caller.call(caller.cache.Allocate, request).sequence
    stats = watcher.stats(pool_id)
    assert (stats.sequence_count, stats.reserved_block_count) == (1, BLOCKS)
    assert release(caller, pool_id, "r") == 1
    assert sequence.request_id == "r"
    assert is_free(watcher, pool_id)


def test_a_call_that_is_cancelled_before_its_turn_does_nothing(path: str, watcher: RawCaller) -> None:
    """It waited behind a long one of its session."""

    def attempt(caller: RawCaller, pool_id: str) -> bool:
        long = begun(caller, watcher, pool_id, request_id="long")
        request = cache.ReleaseRequest(pool_id=pool_id, items=[cache.ReleaseItem(request_id="long")])
        short = caller.cache.Release.future(request, metadata=caller.metadata, timeout=30)
        # It has mostly arrived when another call has come back.
        watcher.stats(pool_id)
        short.cancel()
        long.result(timeout=30)
        release(caller, pool_id, "nothing")
        return release(caller, pool_id, "long") == 1

    sooner_or_later(path, watcher, attempt)


def test_a_deadline_is_as_good_as_a_cancellation(path: str, watcher: RawCaller) -> None:
    """It passes while the call waits for its turn behind a long one of its session: nothing is held without a name."""

    def attempt(caller: RawCaller, pool_id: str) -> bool:
        before = watcher.stats(pool_id).counters.allocate_count
        long = begun(caller, watcher, pool_id, request_id="long")
        request = cache.AllocateRequest(pool_id=pool_id, token_ids=PROMPT[:4])
        short = caller.cache.Allocate.future(request, metadata=caller.metadata, timeout=0.001)
        is_late = short.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        long.result(timeout=30)
        release(caller, pool_id, "long")
        return is_late and is_free(watcher, pool_id) and watcher.stats(pool_id).counters.allocate_count == before + 1

    sooner_or_later(path, watcher, attempt)


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
    assert waiting.cancel()
    until(lambda: watcher.stats(pool_id).waiting_count, lambda count: count == 0)
    assert release(watcher, pool_id, "all") == 1
    assert is_free(watcher, pool_id)
