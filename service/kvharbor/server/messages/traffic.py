"""Misses and traffic of a pool as messages."""

from typing import Final

from kvharbor.pool import Miss, MissKind, Times, TrafficStats
from kvharbor.pool.evicted import ADMINISTRATOR
from kvharbor.pool.traffic import BOUNDS_S
from kvharbor.server.messages.wire import duration_message
from kvharbor.v1 import cache_service_pb2 as pb

_KINDS: Final = {kind: pb.MissKind.Value(f"MISS_KIND_{kind.name}") for kind in MissKind}
_BOUNDS: Final = [duration_message(bound_s) for bound_s in BOUNDS_S]


def miss_message(miss: Miss | None) -> pb.Miss | None:
    """Returns why a match ended, or None as it is."""
    if miss is None:
        return None
    message = pb.Miss(
        kind=_KINDS[miss.kind],
        present_tokens=miss.present_tokens,
        remembered=duration_message(miss.remembered_s),
        differing_parts=miss.differ,
    )
    if miss.evicted_s is not None:
        message.evicted_ago.CopyFrom(duration_message(miss.evicted_s))
    if miss.evicted_by == ADMINISTRATOR:
        message.administrator = True
    elif miss.evicted_by is not None:
        message.session_id = str(miss.evicted_by)
    return message


def traffic_message(traffic: TrafficStats, block_tokens: int) -> pb.TrafficStats:
    """Returns how blocks of so many tokens are used."""
    return pb.TrafficStats(
        misses=[pb.MissCount(kind=_KINDS[kind], count=count) for kind, count in traffic.misses.items()],
        recomputed_token_count=traffic.recomputed_block_count * block_tokens,
        reuse_gaps=_histogram(traffic.reuse_gaps),
        residences=_histogram(traffic.residences),
    )


def _histogram(times: Times) -> pb.TimeHistogram:
    return pb.TimeHistogram(bounds=_BOUNDS, counts=times.counts)
