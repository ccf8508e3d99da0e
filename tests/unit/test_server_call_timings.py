"""Durations of calls as Prometheus reads histograms."""

from kvharbor.server.calls.timings import BOUNDS_S, CallTimings, Histogram


def test_a_bucket_has_what_is_within_its_bound() -> None:
    """Bounds are inclusive and buckets cumulative; the last has everything."""
    histogram = Histogram((0.1, 0.5))
    for duration_s in (0.05, 0.1, 0.3, 7.0):
        histogram.add(duration_s)
    assert histogram.cumulative() == [("0.1", 2), ("0.5", 3), ("+Inf", 4)]
    assert histogram.sum_s == 0.05 + 0.1 + 0.3 + 7.0


def test_calls_are_told_apart_by_method_and_outcome() -> None:
    """Each pair has a histogram of its own."""
    timings = CallTimings()
    for method, code in (("Allocate", "OK"), ("Commit", "OK"), ("Allocate", "OK"), ("Allocate", "CANCELLED")):
        timings.add(method, code, 0.001)
    assert [(method, code, sum(histogram.counts)) for method, code, histogram in timings] == [
        ("Allocate", "CANCELLED", 1),
        ("Allocate", "OK", 2),
        ("Commit", "OK", 1),
    ]


def test_bounds_rise() -> None:
    """Else a bucket would be smaller than the one before it."""
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))
