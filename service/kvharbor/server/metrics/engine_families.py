"""What the metrics say of engines, by the name of their software. All of it can be added up."""

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvharbor.pool import EngineGroup, EngineStats
from kvharbor.server.metrics.named_series import OTHER

_FIGURES: Final = (
    ("sessions", GaugeMetricFamily, "Sessions of engines of this name, one for each pool that it has open."),
    ("committed_blocks", GaugeMetricFamily, "Blocks in the index that they have published."),
    ("prompt_tokens", CounterMetricFamily, "Prompt tokens of their granted requests."),
)
SERIES_AN_ENGINE: Final = len(_FIGURES) + 1
"""The last one is of a pair of engines, of which there are no more than of engines."""
_GROUPS: Final = {EngineGroup.OTHERS: OTHER, EngineGroup.EARLIER: "earlier process"}

Figures = dict[str, list[float]]
Reuses = dict[tuple[str, str], list[float]]


def add(engines: tuple[EngineStats, ...], figures: Figures, reuses: Reuses) -> None:
    """Adds a pool's engines to figures by name, and to reused tokens by (who reuses, who has published)."""
    names = [_GROUPS.get(one.group, one.engine.name) for one in engines]
    for name, one in zip(names, engines, strict=True):
        row = figures.setdefault(name, [0.0] * len(_FIGURES))
        for column, value in enumerate((one.session_count, one.committed_block_count, one.prompt_token_count)):
            row[column] += value
        for place, token_count in one.reuses:
            reuses.setdefault((name, names[place]), [0.0])[0] += token_count


def families(figures: Mapping[str, list[float]], reuses: Mapping[tuple[str, str], list[float]]) -> Iterator[Metric]:
    """Yields the families."""
    for column, (name, kind, meaning) in enumerate(_FIGURES):
        family = kind(f"kvharbor_engine_{name}", meaning, labels=["engine"])
        for engine, row in figures.items():
            family.add_metric([engine], row[column])
        yield family
    reused = CounterMetricFamily(
        "kvharbor_engine_reused_tokens",
        "Of the prompt tokens, those whose KV was there already, by the engine that has published it.",
        labels=["engine", "of"],
    )
    for names, (token_count,) in reuses.items():
        reused.add_metric(names, token_count)
    yield reused
