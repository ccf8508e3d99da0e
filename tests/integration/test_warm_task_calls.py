"""Warm tasks as they are called for over the socket: claims, fills that cannot be, and waits that end."""

import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import RawCaller, refused, tokens
from service_process import ServiceProcess


def test_a_claim_is_repeated_by_its_request_id_and_undone_by_it(harbor: str) -> None:
    """Whoever never sees the reply releases by the request_id; the task waits again."""
    with RawCaller(harbor) as caller:
        pool_id = caller.open_pool("warm-raw")
        order = cache.WarmupRequest(
            pool_id=pool_id, token_ids=tokens(*range(32)), name="w", fill=cache.WARMUP_FILL_ENGINE
        )
        caller.call(caller.cache.Warmup, order)
        claim = cache.ClaimWarmTaskRequest(pool_id=pool_id, request_id="r")
        first = caller.call(caller.cache.ClaimWarmTask, claim)
        assert first == caller.call(caller.cache.ClaimWarmTask, claim)
        item = cache.ReleaseItem(request_id="r")
        caller.call(caller.cache.Release, cache.ReleaseRequest(pool_id=pool_id, items=[item]))
        again = caller.call(caller.cache.ClaimWarmTask, claim)
        assert (again.name, again.sequence.sequence_id != first.sequence.sequence_id) == ("w", True)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"fill": 9}, "INVALID_FIELD"),
        ({"fill": cache.WARMUP_FILL_CALLER}, "POOL_NOT_FOUND"),
        ({"fill": cache.WARMUP_FILL_NOBODY, "wait": {"seconds": 1}}, "INVALID_FIELD"),
        ({"fill": cache.WARMUP_FILL_ENGINE, "wait": {"seconds": -1}}, "INVALID_FIELD"),
    ],
)
def test_a_fill_that_cannot_be_is_refused(harbor: str, fields: dict[str, Any], reason: str) -> None:
    """An unknown one, one's own without the pool, and a wait for nobody."""
    with RawCaller(harbor) as opener, RawCaller(harbor) as caller:
        pool_id = opener.open_pool("warm-fills")
        request = cache.WarmupRequest(pool_id=pool_id, token_ids=tokens(*range(16)), name="w", **fields)
        with refused() as found:
            caller.call(caller.cache.Warmup, request)
        assert found[0].reason == reason


def test_a_wait_ends_when_the_service_stops(start_fresh: Callable[..., ServiceProcess]) -> None:
    """With DRAINING, well before the wait is over."""
    service = start_fresh()
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("draining")
        request = cache.WarmupRequest(
            pool_id=pool_id,
            token_ids=tokens(*range(16)),
            name="w",
            fill=cache.WARMUP_FILL_ENGINE,
            wait=Duration(seconds=60),
        )
        waiting = caller.cache.Warmup.future(request, metadata=caller.metadata)
        claim = cache.ClaimWarmTaskRequest(pool_id=pool_id)
        while True:
            with contextlib.suppress(grpc.RpcError):  # not ordered yet
                assert caller.call(caller.cache.ClaimWarmTask, claim).name == "w"
                break
        assert service.stop() == 0
        assert waiting.code() is grpc.StatusCode.UNAVAILABLE
