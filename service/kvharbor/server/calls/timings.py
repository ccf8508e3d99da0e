"""How long calls took, by method and outcome: histograms for the metrics."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

BOUNDS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the buckets, in seconds; a last one has the rest."""


@dataclass(slots=True)
class Histogram:
    """Durations by size. `counts` is not cumulative and has one bucket more than there are bounds."""

    bounds_s: Sequence[float] = BOUNDS_S
    counts: list[int] = field(default_factory=list)
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds_s) + 1)

    def add(self, duration_s: float) -> None:
        """Counts one duration."""
        self.counts[bisect.bisect_left(self.bounds_s, duration_s)] += 1
        self.sum_s += duration_s

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns the buckets as Prometheus has them: upper bound, and how many durations were within it."""
        bounds = [*(repr(bound) for bound in self.bounds_s), "+Inf"]
        total = 0
        return [(bound, total := total + count) for bound, count in zip(bounds, self.counts, strict=True)]


class CallTimings:
    """The histograms of all calls.

    Plain numbers, touched on the event loop only: a call never waits for a reader of metrics [S16]. The API
    bounds the methods and gRPC the codes, so the number of histograms is bounded too.
    """

    def __init__(self) -> None:
        self._by_call: dict[tuple[str, str], Histogram] = {}

    def add(self, method: str, code: str, duration_s: float) -> None:
        """Counts a call that has ended; `code` is the name of its status, e.g. "OK"."""
        histogram = self._by_call.get((method, code))
        if histogram is None:
            histogram = self._by_call[method, code] = Histogram()
        histogram.add(duration_s)

    def __iter__(self) -> Iterator[tuple[str, str, Histogram]]:
        """Yields method, code and histogram."""
        for (method, code), histogram in sorted(self._by_call.items()):
            yield method, code, histogram
