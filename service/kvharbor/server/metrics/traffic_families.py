"""What the metrics say of how a pool's blocks are used. All of it can be added up."""

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from kvharbor.pool import MissKind, TrafficStats
from kvharbor.pool.traffic import BOUNDS_S

_LABELS: Final = ("tenant", "pool")
_BOUNDS: Final = (*(f"{bound_s:g}" for bound_s in BOUNDS_S), "+Inf")
_HISTOGRAMS: Final = (
    ("reuse_gap", "Blocks by how soon they were asked for again, evicted ones too; estimated from a sample."),
    ("residence", "Evicted blocks by how long they had been there; estimated from a sample."),
)
SERIES_A_POOL: Final = len(MissKind) + len(_HISTOGRAMS) * (len(_BOUNDS) + 2)


def columns(traffic: TrafficStats) -> list[float]:
    """Returns the figures in the order in which `families` takes them."""
    row: list[float] = [traffic.misses[kind] for kind in MissKind]
    for times in (traffic.reuse_gaps, traffic.residences):
        row += (*times.counts, times.sum_s)
    return row


def families(rows: Mapping[tuple[str, str], list[float]]) -> Iterator[Metric]:
    """Yields the families of pools' figures by tenant and name."""
    misses = CounterMetricFamily(
        "kvharbor_pool_misses",
        "Granted Allocates that could have reused more, by why they have not.",
        labels=[*_LABELS, "reason"],
    )
    for names, row in rows.items():
        for column, kind in enumerate(MissKind):
            misses.add_metric([*names, kind.value], row[column])
    yield misses
    first = len(MissKind)
    for name, meaning in _HISTOGRAMS:
        end = first + len(_BOUNDS)
        family = HistogramMetricFamily(f"kvharbor_pool_{name}_seconds", meaning, labels=_LABELS)
        for names, row in rows.items():
            family.add_metric(names, _cumulative(row[first:end]), row[end])
        yield family
        first = end + 1


def _cumulative(counts: list[float]) -> list[tuple[str, float]]:
    total, buckets = 0.0, []
    for bound, count in zip(_BOUNDS, counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
