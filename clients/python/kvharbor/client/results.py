"""What calls take and give: frozen values."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvharbor.client.engines import EngineStats
from kvharbor.client.pins import PinStats
from kvharbor.client.traffic import Miss, TrafficStats
from kvharbor.gpumem import Layout

SequenceT = TypeVar("SequenceT")
PoolT = TypeVar("PoolT")


@dataclass(frozen=True, slots=True)
class Namespace:
    """The caller's part of a namespace; blocks never match across namespaces.

    `version` names the weights, `adapter` a LoRA or the like, `salt` separates users whose prompts must not
    meet (at most 256 bytes). An empty version is the session's, as by `bump_namespace`. A `scheme` says that blocks are
    known by opaque keys, and how the caller computes these, seed included: block calls alone take it.
    """

    version: str = ""
    adapter: str = ""
    salt: bytes = b""
    scheme: str = ""


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Tells equal placeholder tokens apart: what stands at `token_offset`, counted from the sequence's start."""

    token_offset: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Shadow:
    """An own block at `position` of the table whose content another block has already published."""

    position: int
    block_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What a commit did: tokens in published blocks, and the shadows among the blocks of this commit.

    `pending`: the service is away and learns of the commit when it is back, so nothing is published yet [C11].
    """

    committed_tokens: int
    shadows: tuple[Shadow, ...] = ()
    pending: bool = False


@dataclass(frozen=True, slots=True)
class Lookup:
    """Of a prompt: tokens in committed whole blocks, and tokens that an allocate would reuse now.

    `miss` tells why not more; None if all whole blocks are there.
    """

    present_tokens: int
    cached_tokens: int
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class Warm(Generic[SequenceT]):
    """What is pinned of a prefix, and the sequence to compute and commit the rest with, if tokens are missing.

    The sequence's cached_tokens equal pinned_tokens; release it after its last commit. `ttl_s` is what was
    granted, by the service's clock; None: until unwarm.
    """

    pinned_tokens: int
    missing_tokens: int
    ttl_s: float | None
    sequence: SequenceT | None


@dataclass(frozen=True, slots=True)
class WarmOrder:
    """How far a prefix is that an engine shall make whole. `ttl_s` as in Warm.

    `task_pending`: the missing tokens wait for an engine, or one is at work on them; false with tokens missing:
    the task was given up or ended. `accepting_session_count` sessions have the pool open and accept such tasks.
    """

    pinned_tokens: int
    missing_tokens: int
    ttl_s: float | None
    task_pending: bool
    accepting_session_count: int


@dataclass(frozen=True, slots=True, eq=False)
class WarmTask(Generic[PoolT, SequenceT]):
    """A prefix to compute for the pin `name`, claimed by this session.

    `tokens` (uint32) are those of the sequence: compute and commit them from its cached_tokens on, with the
    weights and the adapter that the namespace names, then release it. Released before that, the task goes to
    another session, or back to this one, and is given up after three claims. `ttl_s` is what is left of the
    pin's time; None: until unwarm.
    """

    pool: PoolT
    name: str
    tokens: npt.NDArray[np.uint32]
    extra_keys: tuple[ExtraKey, ...]
    namespace: Namespace
    sequence: SequenceT
    ttl_s: float | None


@dataclass(frozen=True, slots=True)
class Upgrade:
    """The process of the service that is to be replaced: its epoch, and how many of it there were before."""

    epoch: str
    restart_count: int


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """A pool as tools see it. A name is one pool in each tenant.

    `block_count` includes the scratch blocks, `size_bytes` is of each part.
    `devices` are the UUIDs of where its parts lie, by rank; empty for a pool in host memory.
    `layout` is what to open it with; None where it says what this client does not know.
    """

    pool_id: str
    name: str
    tenant: str
    epoch: str
    arena_kind: str
    model: str
    block_tokens: int
    block_count: int
    size_bytes: int
    devices: tuple[str, ...] = ()
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class PoolCounters:
    """Totals since the pool was made; `PoolCounters` of cache_service.proto says what each counts."""

    allocate_count: int
    hit_count: int
    prompt_token_count: int
    reused_token_count: int
    committed_block_count: int
    shadow_block_count: int
    evicted_block_count: int
    refused_count: int
    copied_block_count: int
    pending_wait_count: int
    takeover_count: int


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant's part in a pool."""

    tenant: str
    committed_block_count: int
    sequence_count: int
    prompt_token_count: int
    reused_token_count: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One pool at one moment; free + reserved + active + cached + warm + quarantined = total [G5].

    Scratch blocks are beside the total, shared ones are counted in their class as well. `pins` has at most 64 of the
    `pin_count` pins, the oldest first.
    """

    pool_id: str
    name: str
    tenant: str
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
    block_bytes: int
    used_bytes: int
    total_bytes: int
    sequence_count: int
    pin_count: int
    warm_budget_used_block_count: int
    warm_budget_block_count: int
    waiting_count: int
    counters: PoolCounters
    tenants: tuple[TenantStats, ...]
    warm_task_waiting_count: int
    warm_task_filling_count: int
    pending_waiting_count: int
    traffic: TrafficStats
    engines: tuple[EngineStats, ...]
    pins: tuple[PinStats, ...]


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """All pools that the caller may see, in order of name, and the sessions of the service."""

    pools: tuple[PoolStats, ...]
    session_count: int


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A chain of published blocks, each the parent of the next, the first the child of `parent_digest`."""

    revision: int
    parent_digest: bytes
    digests: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that left the index."""

    revision: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PinEnded:
    """A warm pin that ended, by its ttl (`expired`) or by unwarm."""

    revision: int
    name: str
    expired: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """Everything up to `revision` has been seen: the snapshot is complete, or nothing else happened."""

    revision: int


WatchEvent = BlocksStored | BlocksRemoved | PinEnded | Progress
"""What a watch yields. A watch from 0 yields the index as BlocksStored first, then Progress."""
