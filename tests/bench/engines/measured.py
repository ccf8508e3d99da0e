"""The figures that follow from what the rounds have shown."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median, quantiles

from bench.engines.seen import COUNT, KV_BYTES, Seen
from bench.figures import Figure

Rounds = Mapping[str, Sequence[Seen]]
Waves = Mapping[str, Sequence[Sequence[Seen]]]
MIB = 2**20
# In units of one engine's cache: own ones, and the pool.
CACHES = {"plain": COUNT, "pool": 1, "copy": COUNT + 1}
COMPARED = ("pool", "copy")


def figures(shared: Rounds, alone: Waves) -> list[Figure]:
    """Returns the figures of all kinds; those of one kind have its name at their end."""
    first, later, all_waves = (
        {kind: [seen for waves in alone[kind] for seen in waves[part]] for kind in alone}
        for part in (slice(1), slice(1, None), slice(None))
    )
    return [*_sharing(shared), *_nothing_shared(all_waves), *_scheduling(first, later)]


def _sharing(shared: Rounds) -> Iterable[Figure]:
    for kind in shared:
        computed = median(seen.computed_tokens for seen in shared[kind])
        times_ms = [one.ttft_s * 1000 for seen in shared[kind] for one in seen.answered]
        over = median(seen.computed_tokens / seen.least_computed_tokens for seen in shared[kind])
        yield Figure(f"shared_computed_tokens_{kind}", computed, "tokens", None)
        yield Figure(f"shared_computed_over_once_{kind}", over, "ratio", 1.0 if kind == "pool" else None)
        yield Figure(f"shared_ttft_p50_ms_{kind}", median(times_ms), "ms", None)
        yield Figure(f"shared_ttft_p95_ms_{kind}", quantiles(times_ms, n=20)[-1], "ms", None)
        speed = median(seen.answer_tokens_per_s for seen in shared[kind])
        yield Figure(f"shared_tokens_per_s_{kind}", speed, "tokens/s", None, "higher")
        yield Figure(f"kv_mib_{kind}", CACHES[kind] * KV_BYTES / MIB, "MiB", None)


def _nothing_shared(alone: Rounds) -> Iterable[Figure]:
    for kind in alone:
        speed = median(seen.answer_tokens_per_s for seen in alone[kind])
        yield Figure(f"alone_tokens_per_s_{kind}", speed, "tokens/s", None, "higher")
    compared = [kind for kind in COMPARED if kind in alone]
    for kind in compared:
        pairs = zip(alone[kind], alone["plain"], strict=True)
        ratio = median(own.answer_tokens_per_s / plain.answer_tokens_per_s for own, plain in pairs)
        yield Figure(f"alone_tokens_per_s_{kind}_over_plain", ratio, "ratio", 0.97, "higher")


def _scheduling(first: Rounds, later: Rounds) -> Iterable[Figure]:
    compared = [kind for kind in COMPARED if kind in later]
    for kind in compared:
        yield Figure(f"admission_extra_us_{kind}", _extra(later, kind, "admission_us"), "us", 500.0)
    for kind in compared:
        yield Figure(f"admission_after_idle_extra_us_{kind}", _extra(first, kind, "admission_us"), "us", 500.0)
    for kind in compared:
        yield Figure(f"decode_extra_us_{kind}", _extra(later, kind, "decode_us"), "us", 0.0)


def _extra(rounds: Rounds, kind: str, name: str) -> float:
    """What a step of the scheduler takes longer than in a plain engine, in the median."""
    own, plain = (_median([getattr(seen, name) for seen in rounds[each]]) for each in (kind, "plain"))
    return own - plain


def _median(times: Sequence[Sequence[float]]) -> float:
    return median(time for each in times for time in each)
