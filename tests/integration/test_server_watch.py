"""Watch over the wire: snapshot, events, resumption and every way to end."""

from typing import Any

import grpc

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import cache_service_pb2_grpc
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import RawCaller, Refused, refused, tokens
from service_process import ServiceProcess


def watch(caller: RawCaller, pool_id: str, start_revision: int = 0) -> Any:
    """Begins a watch."""
    request = cache.WatchRequest(pool_id=pool_id, start_revision=start_revision)
    return caller.call(caller.cache.Watch, request)


def publish(caller: RawCaller, pool_id: str, *ids: int) -> None:
    """Commits a prompt and leaves it cached."""
    allocate = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*ids))
    sequence = caller.call(caller.cache.Allocate, allocate).sequence
    item = cache.CommitItem(sequence_id=sequence.sequence_id, computed_tokens=len(ids))
    caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
    end = cache.ReleaseItem(sequence_id=sequence.sequence_id)
    caller.call(caller.cache.Release, cache.ReleaseRequest(pool_id=pool_id, items=[end]))


def ended(stream: Any) -> Refused:
    """Reads a watch to its end."""
    with refused() as found:
        for _ in stream:
            pass
    return found[0]


def test_an_empty_index_is_a_complete_snapshot(caller: RawCaller) -> None:
    """A watcher always knows when it has seen everything."""
    stream = watch(caller, caller.open_pool("watch-empty"))
    snapshot = next(stream).snapshot
    assert (snapshot.complete, len(snapshot.stored)) == (True, 0)
    stream.cancel()


def test_the_snapshot_is_followed_by_what_happens(caller: RawCaller) -> None:
    """Chains with digests, parents first; then events with greater revisions."""
    pool_id = caller.open_pool("watch-follow")
    publish(caller, pool_id, *range(32))
    stream = watch(caller, pool_id)
    snapshot = next(stream).snapshot
    (chain,) = snapshot.stored
    assert (len(chain.parent_digest), len(chain.digests), len(chain.blocks.block_ids)) == (32, 64, 8)
    publish(caller, pool_id, *range(16), *range(100, 116))
    event = next(stream).events.events[0]
    assert event.revision > snapshot.revision
    assert event.stored.parent_digest == chain.digests[:32]
    caller.call(caller.cache.Evict, cache.EvictRequest(pool_id=pool_id, all_unheld=True))
    removed = [event.removed.digests for event in next(stream).events.events]
    assert sum(len(digests) for digests in removed) == 3 * 32
    stream.cancel()


def test_a_watch_resumes_where_another_ended(caller: RawCaller) -> None:
    """Nothing twice and nothing left out."""
    pool_id = caller.open_pool("watch-resume")
    publish(caller, pool_id, *range(16))
    stream = watch(caller, pool_id)
    revision = next(stream).snapshot.revision
    stream.cancel()
    publish(caller, pool_id, *range(50, 66))
    resumed = watch(caller, pool_id, revision)
    assert len(next(resumed).events.events[0].stored.digests) == 32
    resumed.cancel()
    assert ended(watch(caller, pool_id, 10_000)).reason == "INVALID_FIELD"
    assert ended(watch(caller, pool_id, -1)).reason == "INVALID_FIELD"


def test_an_idle_watch_gets_progress(start_fresh: StartService) -> None:
    """So that it can resume later than its last event."""
    service = start_fresh(watch_progress_s="0.01")
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p")
        stream = watch(caller, pool_id)
        next(stream)
        assert next(stream).HasField("progress")
        stream.cancel()


def test_what_is_not_kept_cannot_be_resumed(start_fresh: StartService) -> None:
    """OUT_OF_RANGE with the revision from which it could."""
    service = start_fresh(watch_backlog="100B")
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p")
        for first in range(0, 64, 16):
            publish(caller, pool_id, *range(first, first + 16))
        end = ended(watch(caller, pool_id, 1))
        assert (end.code, end.reason) == (grpc.StatusCode.OUT_OF_RANGE, "REVISION_COMPACTED")
        assert int(end.metadata["compactRevision"]) > 1


def test_a_slow_reader_is_cut_off(start_fresh: StartService) -> None:
    """It is not buffered for beyond what the transport and the backlog hold."""
    service = start_fresh(watch_backlog="100B")
    # Without probing for bandwidth the transport holds 64 KiB for a reader that does not read.
    options = [("grpc.http2.bdp_probe", 0)]
    with (
        RawCaller(str(service.socket)) as caller,
        grpc.insecure_channel(service.target, options=options) as narrow,
    ):
        pool_id = caller.open_pool("p", block_count=60_000)
        request = cache.WatchRequest(pool_id=pool_id)
        stream = cache_service_pb2_grpc.CacheServiceStub(narrow).Watch(request, metadata=caller.metadata)
        for first in range(200):
            publish(caller, pool_id, *range(first << 20, (first << 20) + 16 * 200))
        end = ended(stream)
        assert (end.code, end.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "WATCHER_TOO_SLOW")


def test_a_dropped_pool_ends_its_watches(caller: RawCaller) -> None:
    """There is nothing left to see."""
    pool_id = caller.open_pool("watch-dropped")
    stream = watch(caller, pool_id)
    next(stream)
    caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=pool_id))
    assert ended(stream).reason == "POOL_NOT_FOUND"


def test_shutdown_ends_watches_at_once(service: ServiceProcess) -> None:
    """UNAVAILABLE with DRAINING, within the grace that calls have."""
    with RawCaller(str(service.socket)) as caller:
        stream = watch(caller, caller.open_pool("p"))
        next(stream)
        service.process.terminate()
        end = ended(stream)
        assert (end.code, end.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert service.wait() == 0
