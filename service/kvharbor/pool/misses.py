"""Why a match ended where it did: what is told of it."""

from enum import StrEnum
from typing import NamedTuple


class MissKind(StrEnum):
    """Why a block is not there, or what is there is not used; the first that applies."""

    BELOW_THRESHOLD = "below_threshold"
    """Something is there, but less than `min_reuse_tokens`."""
    NOT_COMMITTED = "not_committed"
    """A live sequence is computing it."""
    EVICTED = "evicted"
    """It was there."""
    OTHER_NAMESPACE = "other_namespace"
    """Nothing is there, but another namespace of the tenant begins with the same block."""
    NEVER_SEEN = "never_seen"
    """Nothing is known of it: it was never published, or evicted before what is remembered."""


class Miss(NamedTuple):
    """The block behind the first `present_tokens` is not there, or what is there is not used.

    EVICTED: `evicted_s` ago, for the session `evicted_by`, or by an administrator (`evicted.ADMINISTRATOR`); None if
    that was another tenant's. OTHER_NAMESPACE: which parts `differ`. Evictions of the last `remembered_s` are known.
    """

    kind: MissKind
    present_tokens: int
    remembered_s: float
    evicted_s: float | None = None
    evicted_by: int | None = None
    differ: tuple[str, ...] = ()
