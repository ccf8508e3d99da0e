"""What a pool tells of its misses and of how blocks are used: as metrics, as messages, as the client reads them."""

import pytest
from prometheus_client.core import Metric

from kvharbor.client import Miss as ClientMiss
from kvharbor.client import TimeHistogram
from kvharbor.client import traffic as client_traffic
from kvharbor.pool import Miss, MissKind
from kvharbor.pool.evicted import ADMINISTRATOR
from kvharbor.pool.traffic import BOUNDS_S, Traffic
from kvharbor.server.messages.traffic import miss_message, traffic_message
from kvharbor.server.metrics.traffic_families import SERIES_A_POOL, columns, families
from kvharbor.v1 import cache_service_pb2 as pb

BEFORE = {"present_tokens": 32, "remembered_s": 60.0}


def used() -> Traffic:
    """Two blocks published, one of them evicted after 3 s and published again after 20 s more; one miss."""
    traffic = Traffic()
    traffic.misses[MissKind.EVICTED] += 1
    traffic.published([1, 2], [b"1" * 32, b"2" * 32], 0.0)
    traffic.evicted([1], 3.0)
    traffic.published([3], [b"1" * 32], 23.0)
    return traffic


def test_histograms_add_up_and_end_with_their_count() -> None:
    """A bucket has all that is at most as long; the last one is the count, beside it the sum."""
    row = columns(used().stats())
    made: dict[str, Metric] = {family.name: family for family in families({("t", "p"): row, ("other", "other"): row})}
    misses = {sample.labels["reason"]: sample.value for sample in made["kvharbor_pool_misses"].samples[:5]}
    assert misses == {kind.value: float(kind is MissKind.EVICTED) for kind in MissKind}
    for name, time_s in (("residence", 3.0), ("reuse_gap", 23.0)):
        samples = [sample for sample in made[f"kvharbor_pool_{name}_seconds"].samples if sample.labels["tenant"] == "t"]
        buckets = {sample.labels["le"]: sample.value for sample in samples if "le" in sample.labels}
        assert buckets == {f"{bound:g}": float(bound >= time_s) for bound in BOUNDS_S} | {"+Inf": 1.0}
        rest = {sample.name.rpartition("_")[2]: sample.value for sample in samples if "le" not in sample.labels}
        assert rest == {"count": 1.0, "sum": time_s}
    assert sum(len(family.samples) for family in made.values()) == 2 * SERIES_A_POOL


def test_the_client_reads_what_the_pool_has_counted() -> None:
    """Misses by kind, tokens, and histograms with their bounds."""
    read = client_traffic.traffic_stats(traffic_message(used().stats(), block_tokens=16))
    assert read.misses == {kind.value: int(kind is MissKind.EVICTED) for kind in MissKind}
    assert read.recomputed_token_count == 16
    assert (read.residences.bound_of(0.5), read.reuse_gaps.bound_of(0.5)) == (4.0, 64.0)


@pytest.mark.parametrize(
    ("miss", "read", "told"),
    [
        (Miss(MissKind.BELOW_THRESHOLD, 32, 60.0), {}, "what is there is less than min_reuse_tokens"),
        (Miss(MissKind.NOT_COMMITTED, 32, 60.0), {}, "a live sequence is computing it"),
        (
            Miss(MissKind.EVICTED, 32, 60.0, 0.25, 7),
            {"evicted_s": 0.25, "evicted_by_session": "7"},
            "evicted 0.25 s ago for session 7",
        ),
        (
            Miss(MissKind.EVICTED, 32, 60.0, 0.0, ADMINISTRATOR),
            {"evicted_s": 0.0, "evicted_by_administrator": True},
            "evicted 0 s ago by an administrator",
        ),
        (Miss(MissKind.EVICTED, 32, 60.0, 12.0, None), {"evicted_s": 12.0}, "evicted 12 s ago"),
        (
            Miss(MissKind.OTHER_NAMESPACE, 32, 60.0, differ=("adapter", "salt")),
            {"differing_parts": ("adapter", "salt")},
            "there under another adapter and salt",
        ),
        (Miss(MissKind.NEVER_SEEN, 32, 60.0), {}, "never seen, or evicted more than 60 s ago"),
    ],
)
def test_the_client_reads_each_reason_and_says_it(miss: Miss, read: dict[str, object], told: str) -> None:
    """[Y1] What the pool tells arrives, and as a sentence."""
    found = client_traffic.miss(pb.LookupResponse(miss=miss_message(miss)))
    assert found == ClientMiss(miss.kind.value, **BEFORE, **read)  # type: ignore[arg-type]
    assert str(found) == told


def test_no_miss_is_none_and_a_reason_of_later_has_its_number() -> None:
    """A newer service may have more reasons."""
    assert client_traffic.miss(pb.AllocateResponse(miss=miss_message(None))) is None
    later = client_traffic.miss(pb.LookupResponse(miss=pb.Miss(kind=77)))  # type: ignore[arg-type]
    assert later is not None
    assert str(later) == "kind 77"


@pytest.mark.parametrize(
    ("counts", "share", "bound"),
    [
        ((0, 0, 0), 0.5, None),
        ((1, 1, 2), 0.5, 4.0),
        ((1, 1, 2), 0.51, None),
        ((0, 1, 0), 0.0, 4.0),
        ((3, 1, 0), 0.5, 1.0),
    ],
)
def test_a_bound_holds_for_a_share(counts: tuple[int, ...], share: float, bound: float | None) -> None:
    """The lowest bound that as much is within."""
    assert TimeHistogram((1.0, 4.0), counts).bound_of(share) == bound
