"""Why a prompt was not reused further, and how a pool's blocks are used: values, and how they are read from replies."""

from dataclasses import dataclass

from kvharbor.client.durations import seconds
from kvharbor.v1 import cache_service_pb2 as cache


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the block behind the first `present_tokens` was not there, or what was there was not used; str() says it.

    `kind`: below_threshold, not_committed, evicted, other_namespace or never_seen, the first that applies. An eviction
    was `evicted_s` ago, for a session that needed room (its id is `evicted_by_session`) or by an administrator; if for
    neither, then for another tenant. `differing_parts` (version, adapter, salt) tell the other namespace from the one
    asked for. Evictions of the last `remembered_s` are remembered.
    """

    kind: str
    present_tokens: int
    remembered_s: float
    evicted_s: float | None = None
    evicted_by_session: str | None = None
    evicted_by_administrator: bool = False
    differing_parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return {
            "below_threshold": "what is there is less than min_reuse_tokens",
            "not_committed": "a live sequence is computing it",
            "evicted": f"evicted {self.evicted_s or 0:.3g} s ago{self._evicted_by}",
            "other_namespace": f"there under another {' and '.join(self.differing_parts)}",
            "never_seen": f"never seen, or evicted more than {self.remembered_s:.3g} s ago",
        }.get(self.kind, self.kind)

    @property
    def _evicted_by(self) -> str:
        if self.evicted_by_administrator:
            return " by an administrator"
        return f" for session {self.evicted_by_session}" if self.evicted_by_session else ""


@dataclass(frozen=True, slots=True)
class TimeHistogram:
    """Counts by time: one class for each upper bound, ascending, and one more for all that is longer."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]

    def bound_of(self, share: float) -> float | None:
        """Returns a bound that this share of the times is within: None if there are none, or no bound is that high."""
        left = share * sum(self.counts)
        for bound_s, count in zip(self.bounds_s, self.counts, strict=False):
            left -= count
            if count and left <= 0:
                return bound_s
        return None


@dataclass(frozen=True, slots=True)
class TrafficStats:
    """How blocks are used, since the service's process began; but for `misses` estimated from a sample.

    `misses`: granted allocates by the kind of their Miss. `recomputed_token_count`: tokens computed although they had
    been published before. `reuse_gaps`: blocks by how soon they were asked for again, evicted ones too; `residences`:
    evicted blocks by how long they had been there.
    """

    misses: dict[str, int]
    recomputed_token_count: int
    reuse_gaps: TimeHistogram
    residences: TimeHistogram


def miss(reply: cache.AllocateResponse | cache.LookupResponse) -> Miss | None:
    """Reads why no more was there."""
    if not reply.HasField("miss"):
        return None
    told = reply.miss
    return Miss(
        kind=_kind(told.kind),
        present_tokens=told.present_tokens,
        remembered_s=seconds(told.remembered),
        evicted_s=seconds(told.evicted_ago) if told.HasField("evicted_ago") else None,
        evicted_by_session=told.session_id or None,
        evicted_by_administrator=told.administrator,
        differing_parts=tuple(told.differing_parts),
    )


def traffic_stats(message: cache.TrafficStats) -> TrafficStats:
    """Reads how blocks are used."""
    return TrafficStats(
        misses={_kind(counted.kind): counted.count for counted in message.misses},
        recomputed_token_count=message.recomputed_token_count,
        reuse_gaps=_histogram(message.reuse_gaps),
        residences=_histogram(message.residences),
    )


def _kind(number: int) -> str:
    known = cache.MissKind.DESCRIPTOR.values_by_number.get(number)
    return known.name.removeprefix("MISS_KIND_").lower() if known else f"kind {number}"


def _histogram(message: cache.TimeHistogram) -> TimeHistogram:
    bounds_s = tuple(seconds(bound) for bound in message.bounds)
    return TimeHistogram(bounds_s, tuple(message.counts))
