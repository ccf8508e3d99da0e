"""What the pool tells about itself."""

from dataclasses import dataclass

from kvharbor.pool.engines import EngineStats
from kvharbor.pool.misses import MissKind


@dataclass(slots=True)
class Counters:
    """Totals since the pool was made; the field names are those of the API."""

    allocate_count: int = 0
    hit_count: int = 0
    prompt_token_count: int = 0
    reused_token_count: int = 0
    committed_block_count: int = 0
    shadow_block_count: int = 0
    evicted_block_count: int = 0
    refused_count: int = 0
    copied_block_count: int = 0
    pending_wait_count: int = 0
    takeover_count: int = 0


@dataclass(slots=True)
class TenantCounters:
    """One tenant's part."""

    committed_block_count: int = 0
    sequence_count: int = 0
    prompt_token_count: int = 0
    reused_token_count: int = 0


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant's part at one moment."""

    tenant: str
    committed_block_count: int
    sequence_count: int
    prompt_token_count: int
    reused_token_count: int


@dataclass(frozen=True, slots=True)
class Times:
    """A histogram: how many in each class of `traffic.BOUNDS_S`, the last of which has no bound, and their sum."""

    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True)
class TrafficStats:
    """How blocks are used, from a sample, and granted Allocates by why they have not reused more.

    `recomputed_block_count` had been published before: with unlimited memory they would have been there.
    """

    misses: dict[MissKind, int]
    recomputed_block_count: int
    reuse_gaps: Times
    residences: Times


@dataclass(frozen=True, slots=True)
class PinStats:
    """One warm pin at one moment; `filling`: a live sequence is to compute the missing tokens."""

    tenant: str
    name: str
    pinned_tokens: int
    missing_tokens: int
    filling: bool
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One moment: free + reserved + active + cached + warm + quarantined = total ([G5]).

    `unrecorded_count` is how often the ledger had no room for something: it is a miss after a restart ([L8]).
    """

    revision: int
    total_block_count: int
    scratch_block_count: int
    free_block_count: int
    reserved_block_count: int
    active_block_count: int
    cached_block_count: int
    warm_block_count: int
    quarantined_block_count: int
    shared_block_count: int
    sequence_count: int
    pin_count: int
    warm_budget_used_block_count: int
    warm_budget_block_count: int
    unrecorded_count: int
    counters: Counters
    tenants: tuple[TenantStats, ...]
    traffic: TrafficStats
    engines: tuple[EngineStats, ...]
