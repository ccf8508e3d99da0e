"""What is too much for one call is refused at once and whole, and what a caller abandons is not lost."""

import mmap
import resource
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from conftest import StartService
from kvharbor.server.sizes import exact_size
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import pool_service_pb2 as pools
from kvharbor.v1 import types_pb2
from raw_caller import DEADLINE_S, RawCaller, Refused, refused, small_layout, tokens
from service_process import ServiceProcess
from waiting import quickest, seconds

# Far above what a refusal takes, far below what taking the request apart would.
REFUSAL_S = 1.0


def refusal(caller: RawCaller, method: Any, request: Any) -> Refused:
    """Returns what a call is refused with, which must be soon."""
    found: list[Refused] = []

    def ask() -> None:
        with refused() as again:
            caller.call(method, request)
        found.extend(again)

    assert quickest(lambda: seconds(ask), REFUSAL_S) < REFUSAL_S
    return found[0]


def sequence_count(caller: RawCaller, pool_id: str) -> int:
    """Returns how many sequences a pool has."""
    return int(caller.call(caller.cache.Stats, cache.StatsRequest(pool_id=pool_id)).pools[0].sequence_count)


def test_a_list_that_is_too_long_is_refused_before_it_is_taken_apart(caller: RawCaller) -> None:
    """Extra keys and items of a batch: a message has room for a million, and each costs the others time."""
    pool_id = caller.open_pool("limits-lists")
    keys = [types_pb2.ExtraKey(token_offset=3, value=b"v")] * 100_000
    for method, request in (
        (caller.cache.Allocate, cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*range(16)), extra_keys=keys)),
        (caller.cache.Lookup, cache.LookupRequest(pool_id=pool_id, token_ids=tokens(*range(16)), extra_keys=keys)),
        (caller.cache.Release, cache.ReleaseRequest(pool_id=pool_id, items=[cache.ReleaseItem()] * 100_000)),
        (caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[cache.CommitItem()] * 100_000)),
        (caller.cache.Extend, cache.ExtendRequest(pool_id=pool_id, items=[cache.ExtendItem()] * 100_000)),
    ):
        refusal_of = refusal(caller, method, request)
        assert (refusal_of.code, refusal_of.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert refusal_of.metadata["value"] == "100000 entries"
    assert sequence_count(caller, pool_id) == 0


def test_the_longest_batch_is_answered_even_if_each_item_is_refused(caller: RawCaller) -> None:
    """Its reply fits in a message."""
    pool_id = caller.open_pool("limits-batch")
    items = [cache.CommitItem(sequence_id=f"{pool_id}.1.{'9' * 60}")] * 8192
    reply = caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=items))
    assert {result.status.code for result in reply.results} == {grpc.StatusCode.NOT_FOUND.value[0]}


def test_switched_positions_are_bounded_an_item(caller: RawCaller) -> None:
    """As an item's error; its neighbours are not affected."""
    pool_id = caller.open_pool("limits-switched")
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*range(16)))
    sequence_id = caller.call(caller.cache.Allocate, request).sequence.sequence_id
    items = [
        cache.CommitItem(sequence_id=sequence_id, computed_tokens=16, switched_positions=[0] * 100_000),
        cache.CommitItem(sequence_id=sequence_id, computed_tokens=16),
    ]
    bad, good = caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=items)).results
    assert bad.status.metadata["field"] == "switched_positions"
    assert (good.status.code, good.committed_tokens) == (0, 16)


def test_planes_are_counted_before_they_are_made(caller: RawCaller) -> None:
    """A layout of 400,000 planes is refused like one of 33."""
    layout = small_layout()
    planes = types_pb2.Layout(planes=[layout.planes[0]] * 400_000)
    layout.MergeFrom(planes)
    request = pools.OpenPoolRequest(name="limits-planes", layout=layout)
    assert refusal(caller, caller.pools.OpenPool, request).reason == "LAYOUT_INVALID"


def test_a_drop_that_is_abandoned_gives_the_memory_back(service: ServiceProcess) -> None:
    """The caller leaves while the pool still ends what is under way; nobody could drop it again."""
    with RawCaller(str(service.socket)) as owner, RawCaller(str(service.socket)) as reader:
        whole = memory_available(owner)
        pool_id = owner.open_pool("p", block_count=40_000)
        prompt = array("I", range(40_000 * 16)).tobytes()
        put(owner, pool_id, prompt)
        request = cache.LookupRequest(pool_id=pool_id, token_ids=prompt)
        looking = [reader.cache.Lookup.future(request, metadata=reader.metadata, timeout=DEADLINE_S) for _ in range(8)]
        looking[0].result()
        dropping = owner.pools.DropPool.future(pools.DropPoolRequest(pool_id=pool_id), metadata=owner.metadata)
        with refused() as found:
            while True:  # until the pool cannot be found any more: then the drop has begun
                owner.call(owner.cache.Stats, cache.StatsRequest(pool_id=pool_id))
        assert found[0].reason == "POOL_NOT_FOUND"
        dropping.cancel()
        deadline = time.monotonic() + DEADLINE_S
        while memory_available(owner) != whole:
            assert time.monotonic() < deadline, "the memory of the dropped pool is lost"


def test_a_budget_that_is_used_up_is_no_mistake_of_the_caller(service: ServiceProcess) -> None:
    """Without a size nobody has given a wrong one: the setting has no memory left, with or without one."""
    with RawCaller(str(service.socket)) as caller:
        caller.call(caller.pools.OpenPool, pools.OpenPoolRequest(name="all", layout=small_layout()))
        left_bytes = memory_available(caller)
        for size_bytes, remedy in (
            (0, "drop a pool or raise memory"),
            (4096, "ask for less, drop a pool or raise memory"),
        ):
            request = pools.OpenPoolRequest(name="more", layout=small_layout(), size_bytes=size_bytes)
            found = refusal(caller, caller.pools.OpenPool, request)
            assert (found.code, found.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "INSUFFICIENT_MEMORY")
            # Two blocks would be less than a page, in which memory comes.
            needed, left = exact_size(size_bytes or mmap.PAGESIZE), exact_size(left_bytes)
            assert found.message == f"needs {needed}, the setting memory leaves {left}: {remedy}"


@pytest.mark.slow
def test_a_pool_larger_than_memory_stops_the_start(tmp_path: Path) -> None:
    """One line, status 2, and nothing left behind; a service that starts would refuse it at its first use."""
    file = tmp_path / "kvharbor.toml"
    file.write_text('[pools.main]\nsize = "48GiB"\n')
    service = ServiceProcess(tmp_path / "kv.sock", "--memory=64MiB", f"--config={file}")
    assert service.wait() == 2
    told = "setting pools.main.size (file): 48GiB is more than memory (64MiB): set less, or raise memory"
    assert service.lines == [f"kvharbor: {told}\n"]
    assert service.files() == []


def put(caller: RawCaller, pool_id: str, prompt: bytes) -> None:
    """Commits a prompt and leaves it cached."""
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=prompt)
    sequence_id = caller.call(caller.cache.Allocate, request).sequence.sequence_id
    item = cache.CommitItem(sequence_id=sequence_id, computed_tokens=len(prompt) // 4)
    caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
    end = cache.ReleaseItem(sequence_id=sequence_id)
    caller.call(caller.cache.Release, cache.ReleaseRequest(pool_id=pool_id, items=[end]))


def memory_available(caller: RawCaller) -> int:
    """Returns the bytes not yet given to a pool."""
    return int(caller.call(caller.pools.GetServerInfo, pools.GetServerInfoRequest()).memory_available_bytes)


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """The usual soft limit, for this process and what it starts; yields the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_sessions_are_not_limited_by_the_usual_soft_limit(few_descriptors: int, service: ServiceProcess) -> None:
    """Each takes two descriptors, and 1,024 sessions are allowed by default."""
    assert resource.prlimit(service.child_pid, resource.RLIMIT_NOFILE) == (few_descriptors, few_descriptors)


@pytest.mark.slow
def test_memory_that_holds_hardly_a_pool_is_warned_of(start_fresh: StartService) -> None:
    """A unit may be a mistake; up to a megabyte nobody means it, from there on nothing is said."""
    warning = "memory has hardly room for a pool"
    little = start_fresh(memory="1024B")
    assert little.wait_for(warning)["memory"] == "1024 bytes (1.0 KiB)"
    enough = start_fresh(memory="1MiB")
    enough.wait_for("ready")
    assert warning not in "".join(enough.lines)
