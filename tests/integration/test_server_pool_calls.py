"""Pools and sessions as they are called for over the socket: what is told, opened, listed, dropped and closed."""

import concurrent.futures
from typing import Any

import grpc
import pytest

from kvharbor.gpumem import left_memory
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import BLOCK_BYTES, RawCaller, refused, small_layout, tokens
from service_process import ServiceProcess


def test_the_service_tells_what_it_is_without_a_session(harbor: str) -> None:
    """GetServerInfo works for anybody who reaches the socket; pools need somebody who is known."""
    with RawCaller(harbor) as caller:
        info = caller.pools.GetServerInfo(pools.GetServerInfoRequest(), timeout=5)
        assert (list(info.api_versions), list(info.arena_kinds)) == (["v1"], ["host"])
        assert info.epoch == caller.welcome.epoch
        assert 0 <= info.memory_available_bytes <= info.memory_bytes == 64 * 2**20
        assert caller.cache.Stats(cache.StatsRequest(), timeout=5).session_count >= 1
        with refused() as found:
            caller.pools.ListPools(pools.ListPoolsRequest(), timeout=5)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNAUTHENTICATED, "SESSION_REQUIRED")
        with refused() as found:
            caller.pools.ListPools(pools.ListPoolsRequest(), metadata=(("kvharbor-session", "forged"),), timeout=5)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNAUTHENTICATED, "SESSION_UNKNOWN")


def test_every_reply_and_refusal_names_the_epoch(caller: RawCaller, pool_id: str) -> None:
    """The trailer of a call has it, so that a caller in any language notices another life of the service."""

    def named(call: Any) -> list[str]:
        return [value for name, value in call.trailing_metadata() if name == "kvharbor-epoch"]

    _, answered = caller.cache.Stats.with_call(cache.StatsRequest(pool_id=pool_id), metadata=caller.metadata)
    with pytest.raises(grpc.RpcError) as refusal:
        caller.call(caller.cache.Stats, cache.StatsRequest(pool_id=f"{pool_id}0"))
    watch = caller.cache.Watch(cache.WatchRequest(pool_id=f"{pool_id}0"), metadata=caller.metadata)
    assert named(answered) == named(refusal.value) == named(watch) == [caller.welcome.epoch]


def test_opening_twice_gives_the_same_pool(caller: RawCaller) -> None:
    """Another size or layout is refused, and every differing field named."""
    layout = small_layout()
    first = caller.open_pool("twice")
    assert caller.open_pool("twice") == first
    with refused() as found:
        caller.open_pool("twice", block_count=65)
    assert (found[0].reason, found[0].metadata["currentSizeBytes"]) == ("POOL_SIZE_MISMATCH", str(65 * BLOCK_BYTES))
    layout.model = "other"
    layout.planes[0].head_count, layout.planes[0].head_dim = 2, 8
    with refused() as found:
        caller.open_pool("twice", layout=layout)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_MISMATCH")
    assert found[0].metadata == {
        "model": "other != m",
        "planes.k.head_count": "2 != 1",
        "planes.k.head_dim": "8 != 16",
    }


def test_concurrent_openings_of_a_name_make_one_pool(harbor: str) -> None:
    """Memory is booked once, whoever comes first."""
    callers = [RawCaller(harbor) for _ in range(4)]
    before = callers[0].pools.GetServerInfo(pools.GetServerInfoRequest()).memory_available_bytes
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda caller: caller.open_pool("raced", block_count=8191), callers))
    after = callers[0].pools.GetServerInfo(pools.GetServerInfoRequest()).memory_available_bytes
    assert len(set(opened)) == 1
    assert before - after == 8192 * BLOCK_BYTES
    for caller in callers[1:]:
        caller.call(caller.pools.CloseSession, pools.CloseSessionRequest())
    dropped = callers[0].call(callers[0].pools.DropPool, pools.DropPoolRequest(pool_id=opened[0]))
    assert dropped == pools.DropPoolResponse(already_dropped=False)
    assert callers[0].pools.GetServerInfo(pools.GetServerInfoRequest()).memory_available_bytes == before
    for caller in callers:
        caller.close()


def test_a_pool_that_is_used_is_not_dropped(caller: RawCaller, harbor: str) -> None:
    """By another session, a sequence or a pin; each count is told. Dropping twice is nothing."""
    dropped = caller.open_pool("dropped")
    request = pools.DropPoolRequest(pool_id=dropped)
    with RawCaller(harbor) as other:
        other.open_pool("dropped")
        other.allocate(dropped, 1)
        with refused() as found:
            caller.call(caller.pools.DropPool, request)
        assert (found[0].reason, found[0].metadata) == (
            "POOL_IN_USE",
            {"sessionCount": "1", "sequenceCount": "1", "pinCount": "0", "blockCount": "0"},
        )
        other.call(other.pools.CloseSession, pools.CloseSessionRequest())
    assert not caller.call(caller.pools.DropPool, request).already_dropped
    assert caller.call(caller.pools.DropPool, request).already_dropped
    with refused() as found:
        caller.call(caller.pools.DescribePool, pools.DescribePoolRequest(pool_id=dropped))
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.NOT_FOUND, "POOL_NOT_FOUND")


def test_a_service_is_not_told_to_map_what_a_dropped_pool_had(service: ServiceProcess) -> None:
    """Operators are to end whoever maps arenas without an owner: never the service itself."""
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("dropped")
        assert not caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=pool_id)).already_dropped
        assert service.child_pid not in dict(left_memory().shares)


def test_stats_name_the_oldest_pins_and_count_all(caller: RawCaller) -> None:
    """What a snapshot costs does not grow with what a tenant pins; each says what is left of its time."""
    pool_id = caller.open_pool("pins", block_count=512)
    caller.commit(pool_id, caller.allocate(pool_id, *range(16)).sequence_id, 16)
    for number in range(70):
        asked = cache.WarmupRequest(pool_id=pool_id, token_ids=tokens(*range(16)), name=str(number))
        if number:
            asked.ttl.FromSeconds(60 + number)
        caller.call(caller.cache.Warmup, asked)
    stats = caller.stats(pool_id)
    assert (stats.pin_count, [pin.name for pin in stats.pins]) == (70, [str(number) for number in range(64)])
    assert not stats.pins[0].HasField("ttl")
    assert 0 < stats.pins[63].ttl.seconds < 123


def test_pools_are_listed_by_name_a_page_at_a_time(service: ServiceProcess) -> None:
    """Each exactly once; a token that is none of ours is refused."""
    with RawCaller(str(service.socket)) as caller:
        for name in ("c", "a", "b"):
            caller.open_pool(name, block_count=1)
        first = caller.call(caller.pools.ListPools, pools.ListPoolsRequest(page_size=2))
        assert [pool.name for pool in first.pools] == ["a", "b"]
        rest = caller.call(
            caller.pools.ListPools, pools.ListPoolsRequest(page_size=2, page_token=first.next_page_token)
        )
        assert ([pool.name for pool in rest.pools], rest.next_page_token) == (["c"], "")
        for wrong in (pools.ListPoolsRequest(page_token="%"), pools.ListPoolsRequest(page_size=-1)):
            with refused() as found:
                caller.call(caller.pools.ListPools, wrong)
            assert found[0].reason == "INVALID_FIELD"


def test_a_session_closed_twice_is_closed(harbor: str) -> None:
    """Its sequences are released, its token is nobody's, and the side socket ends."""
    with RawCaller(harbor) as caller:
        pool_id = caller.open_pool("closing")
        caller.allocate(pool_id, 1)
        assert caller.call(caller.pools.CloseSession, pools.CloseSessionRequest()).released_sequence_count == 1
        assert caller.call(caller.pools.CloseSession, pools.CloseSessionRequest()).released_sequence_count == 0
        assert caller.side.recv(1) == b""
        with refused() as found:
            caller.allocate(pool_id, 1)
        assert found[0].reason == "SESSION_UNKNOWN"
