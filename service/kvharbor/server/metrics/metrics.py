"""What Prometheus scrapes. Every figure is read on the event loop, where the pools live: no lock, no second copy."""

import asyncio
import http
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from kvharbor.server.calls.gate import Gate
from kvharbor.server.calls.timings import Histogram
from kvharbor.server.metrics import engine_families, traffic_families
from kvharbor.server.metrics.http_port import Answer
from kvharbor.server.metrics.named_series import OTHER, NamedSeries
from kvharbor.server.metrics.pool_figures import BLOCKS, CLASSES, COUNTERS, GAUGES
from kvharbor.server.pools.life import Life
from kvharbor.server.pools.pools import Pools
from kvharbor.server.sessions.session import Session, State

K = TypeVar("K")

_FIGURES: Final = (*BLOCKS, *GAUGES, *COUNTERS)
_FREE, _CACHED = CLASSES.index("free"), CLASSES.index("cached")
_SIZE: Final = [figure.name for figure in _FIGURES].index("size_blocks")
_SLICE_POOLS: Final = 64
"""About a millisecond of reading; others are served between two slices [S14]."""

_TENANT_FIGURES: Final = (
    ("committed_blocks", GaugeMetricFamily, "Committed blocks in the tenant's namespaces."),
    ("sequences", GaugeMetricFamily, "Live sequences of the tenant."),
    ("prompt_tokens", CounterMetricFamily, "Prompt tokens of the tenant's granted Allocates."),
    ("reused_tokens", CounterMetricFamily, "Of the prompt tokens, those whose KV was there already."),
)


class Metrics:
    """Makes the page /metrics. What it says of one pool is of one moment ([G5]): the classes sum to the size.

    At most `series_limit` pools, and as many tenants, engines and pairs of engines, have series of their own. The rest
    are summed under "other", so totals stay right whatever the number of tenants [S17].
    """

    def __init__(
        self,
        pools: Pools,
        sessions: Callable[[], Iterable[Session]],
        gate: Gate,
        life: Life,
        *,
        loop_lag: Histogram,
        version: str,
        series_limit: int,
    ) -> None:
        self._pools = pools
        self._sessions = sessions
        self._gate = gate
        self._life = life
        self._loop_lag = loop_lag
        self._version = version
        self._pool_series = NamedSeries[tuple[str, str]](series_limit, (OTHER, OTHER))
        self._tenant_series = NamedSeries[str](series_limit, OTHER)
        self._engine_series = NamedSeries[str](series_limit, OTHER)
        self._reuse_series = NamedSeries[tuple[str, str]](series_limit, (OTHER, OTHER))
        self._process = ProcessCollector(registry=None)
        self._turn = asyncio.Lock()

    async def page(self, accept: str) -> Answer:  # noqa: ARG002 - there is one format
        """Returns the page; callers at the same time get one each, one after the other."""
        async with self._turn:
            families = [*self._service(), *await self._of_pools(), *self._calls(), *self._process.collect()]
            lines = []
            for family in families:
                lines.append(generate_latest(_Single(family)))
                await asyncio.sleep(0)
        return Answer(http.HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, b"".join(lines))

    def _service(self) -> Iterator[Metric]:
        pools, gate, life = self._pools, self._gate, self._life
        yield InfoMetricFamily("kvharbor_build", "The software.", value={"version": self._version})
        yield InfoMetricFamily("kvharbor_epoch", "The life of the service's state.", value={"epoch": life.epoch})
        yield _gauge("ready", "Whether calls are let in.", gate.refusal is None)
        yield _gauge("memory_bytes", "Memory for all pools.", pools.budget.memory_bytes)
        yield _gauge("memory_available_bytes", "Memory not yet given to a pool.", pools.budget.available_bytes)
        sessions = GaugeMetricFamily(
            "kvharbor_sessions", "Sessions by state; ending ones wait for the end of their processes.", labels=["state"]
        )
        counts = Counter(session.state for session in self._sessions())
        for state in State:
            sessions.add_metric([state.value], counts[state])
        yield sessions
        restarts = CounterMetricFamily(
            "kvharbor_restarts", "Processes of this epoch before this one, by what ended them.", labels=["cause"]
        )
        for cause, count in life.restarts.items():
            restarts.add_metric([cause], count)
        yield restarts
        yield _counter(
            "stalls", "Times that the process did not run when it should have, in this epoch.", life.stall_count
        )
        yield _counter("stall_seconds", "Their sum: deadlines were put off by as much.", life.stalled_s)
        lag = HistogramMetricFamily(
            "kvharbor_loop_lag_seconds", "How late the event loop came to a tick, ten a second."
        )
        lag.add_metric([], self._loop_lag.cumulative(), self._loop_lag.sum_s)
        yield lag
        yield _gauge("calls_in_flight", "Unary calls, and those on streams, under way.", gate.call_count)
        yield _gauge("open_streams", "Streaming calls (Watch, Record, Converse) under way.", gate.stream_count)

    def _calls(self) -> Iterator[Metric]:
        durations = HistogramMetricFamily(
            "kvharbor_rpc_duration_seconds",
            "From the arrival of a call, unary or on a stream, to its answer.",
            labels=["method", "code"],
        )
        for method, code, histogram in self._gate.timings:
            durations.add_metric([method, code], histogram.cumulative(), histogram.sum_s)
        yield durations

    async def _of_pools(self) -> list[Metric]:
        rows: dict[tuple[str, str], list[float]] = {}
        traffic: dict[tuple[str, str], list[float]] = {}
        tenants: dict[str, list[float]] = {}
        engines: engine_families.Figures = {}
        reuses: engine_families.Reuses = {}
        for number, served in enumerate(self._pools.all(), 1):
            stats = served.pool.stats()
            rows[served.tenant, served.name] = [figure.value(served, stats) for figure in _FIGURES]
            traffic[served.tenant, served.name] = traffic_families.columns(stats.traffic)
            for one in stats.tenants:
                _add(
                    tenants.setdefault(one.tenant, [0, 0, 0, 0]),
                    (one.committed_block_count, one.sequence_count, one.prompt_token_count, one.reused_token_count),
                )
            engine_families.add(stats.engines, engines, reuses)
            if number % _SLICE_POOLS == 0:
                await asyncio.sleep(0)
        named_pools = self._pool_series.choose({key: int(row[_SIZE]) for key, row in rows.items()})
        named_tenants = self._tenant_series.choose({tenant: int(row[0]) for tenant, row in tenants.items()})
        named_engines = self._engine_series.choose({engine: int(row[2]) for engine, row in engines.items()})
        named_reuses = self._reuse_series.choose({names: int(row[0]) for names, row in reuses.items()})
        return [
            *_pool_families(_summed(rows, named_pools, (OTHER, OTHER))),
            *traffic_families.families(_summed(traffic, named_pools, (OTHER, OTHER))),
            *_tenant_families(_summed(tenants, named_tenants, OTHER)),
            *engine_families.families(
                _summed(engines, named_engines, OTHER), _summed(reuses, named_reuses, (OTHER, OTHER))
            ),
        ]


class _Single:
    """One family as the registry that the encoder asks for."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvharbor_{name}", meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvharbor_{name}", meaning, value=value)


def _add(sums: list[float], values: "list[float] | tuple[int, ...]") -> None:
    for column, value in enumerate(values):
        sums[column] += value


def _summed(rows: dict[K, list[float]], named: frozenset[K], other: K) -> dict[K, list[float]]:
    found: dict[K, list[float]] = {}
    for key, row in rows.items():
        if key in named:
            found[key] = row
        elif other in found:
            _add(found[other], row)
        else:
            found[other] = [*row]
    return found


def _pool_families(rows: dict[tuple[str, str], list[float]]) -> Iterator[Metric]:
    labels = ["tenant", "pool"]
    blocks = GaugeMetricFamily(
        "kvharbor_pool_blocks",
        "Blocks by class. Reserved: held, not committed; active: committed and held; cached: committed and held by "
        "nobody, evictable; warm: pinned; quarantined: left by a session that is not proved gone.",
        labels=[*labels, "class"],
    )
    usage = GaugeMetricFamily(
        "kvharbor_pool_usage_ratio",
        "(reserved + active + warm + quarantined) / size: what cannot be handed out now. Cached blocks are not in use.",
        labels=labels,
    )
    families = [
        kind(f"kvharbor_pool_{figure.name}", figure.meaning, labels=labels)
        for kind, figures in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS))
        for figure in figures
    ]
    for (tenant, pool), row in rows.items():
        for column, name in enumerate(CLASSES):
            blocks.add_metric([tenant, pool, name], row[column])
        free, cached, size = (row[column] for column in (_FREE, _CACHED, _SIZE))
        usage.add_metric([tenant, pool], (size - free - cached) / size)
        for family, value in zip(families, row[len(CLASSES) :], strict=True):
            family.add_metric([tenant, pool], value)
    yield from (blocks, usage, *families)


def _tenant_families(rows: dict[str, list[float]]) -> Iterator[Metric]:
    for column, (name, kind, meaning) in enumerate(_TENANT_FIGURES):
        family = kind(f"kvharbor_tenant_{name}", meaning, labels=["tenant"])
        for tenant, row in rows.items():
            family.add_metric([tenant], row[column])
        yield family
