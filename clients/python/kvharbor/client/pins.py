"""Warm pins, as statistics tell of them: values, and how they are read from replies."""

from dataclasses import dataclass

from kvharbor.client.durations import seconds
from kvharbor.v1 import cache_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class PinStats:
    """A warm pin. It is complete when it misses no tokens; if `filling`, a sequence is to compute those.

    It ends in `ttl_s`; None: it lives until unwarm.
    """

    name: str
    tenant: str
    pinned_tokens: int
    missing_tokens: int
    filling: bool
    ttl_s: float | None


def pin_stats(message: pb.PinStats) -> PinStats:
    """Reads one pin."""
    return PinStats(
        name=message.name,
        tenant=message.tenant,
        pinned_tokens=message.pinned_tokens,
        missing_tokens=message.missing_tokens,
        filling=message.filling,
        ttl_s=seconds(message.ttl) if message.HasField("ttl") else None,
    )
