"""What the caller knows of a request and the pool cannot see: it may make eviction choose better."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvharbor.client.calls import duration, request
from kvharbor.client.errors import InvalidField
from kvharbor.v1 import cache_service_pb2 as cache


class ExpectedReuse(Enum):
    """How often others will ask for what a request leaves behind."""

    UNKNOWN = cache.EXPECTED_REUSE_UNSPECIFIED
    NONE = cache.EXPECTED_REUSE_NONE
    SOME = cache.EXPECTED_REUSE_SOME
    MUCH = cache.EXPECTED_REUSE_MUCH


@dataclass(frozen=True, slots=True)
class Hints:
    """About the blocks that a request publishes: of its prompt, of what is generated, of forked children.

    `priority` is how important the request is, -100 to 100; `retention_s` for how long the prompt will be of use.
    Requests of a tenant with the same hints are a class, and the pool ranks their blocks by what blocks of this class
    have earned: say what you know, and say it consistently. A pool tells four classes of a tenant apart. Wrong hints
    take no room from others.
    """

    priority: int = 0
    retention_s: float | None = None
    expected_reuse: ExpectedReuse = ExpectedReuse.UNKNOWN


NO_HINTS: Final = Hints()


def hints_message(hints: Hints) -> cache.Hints | None:
    """Returns hints as a message, None where there are none."""
    if hints == NO_HINTS:
        return None
    if not isinstance(hints, Hints):
        raise InvalidField.of("hints", hints, limit="Hints", remedy="build them of what you know")
    if not isinstance(hints.expected_reuse, ExpectedReuse):
        raise InvalidField.of(
            "hints.expected_reuse", hints.expected_reuse, limit="an ExpectedReuse", remedy="name one, such as MUCH"
        )
    message = request(cache.Hints, priority=hints.priority, expected_reuse=hints.expected_reuse.value)
    if hints.retention_s is not None:
        message.retention.CopyFrom(duration("hints.retention_s", hints.retention_s))
    return message
