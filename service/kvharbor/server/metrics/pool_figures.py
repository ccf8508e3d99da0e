"""What the metrics say of a pool, one line a figure: name, meaning, where it comes from. All of it can be added up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvharbor.pool import PoolStats
from kvharbor.server.pools.served_pool import ServedPool

CLASSES: Final = ("free", "reserved", "active", "cached", "warm", "quarantined")


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a pool at one moment."""

    name: str
    meaning: str
    value: Callable[[ServedPool, PoolStats], int]


def _of_class(name: str) -> Figure:
    return Figure(name, "", lambda _, stats: int(getattr(stats, f"{name}_block_count")))


BLOCKS: Final = tuple(_of_class(name) for name in CLASSES)
"""The classes, as values of a label."""

GAUGES: Final = (
    Figure(
        "size_blocks",
        "Blocks that can be handed out, in all: the sum over the classes of kvharbor_pool_blocks.",
        lambda _, stats: stats.total_block_count,
    ),
    Figure("scratch_blocks", "Blocks for padding writes, beside the size.", lambda _, stats: stats.scratch_block_count),
    Figure(
        "reclaimable_blocks",
        "Blocks that can be handed out now: free + cached.",
        lambda _, stats: stats.free_block_count + stats.cached_block_count,
    ),
    Figure(
        "shared_blocks",
        "Committed blocks with two or more holders, whatever their class.",
        lambda _, stats: stats.shared_block_count,
    ),
    Figure(
        "size_bytes",
        "Bytes of all blocks, scratch blocks not counted.",
        lambda served, stats: stats.total_block_count * served.block_bytes,
    ),
    Figure(
        "used_bytes",
        "Bytes of the blocks that are not free. A full cache is the normal state, not a leak.",
        lambda served, stats: (stats.total_block_count - stats.free_block_count) * served.block_bytes,
    ),
    Figure("sequences", "Live sequences.", lambda _, stats: stats.sequence_count),
    Figure("pins", "Warm pins.", lambda _, stats: stats.pin_count),
    Figure("warm_budget_blocks", "Blocks that pins may hold.", lambda _, stats: stats.warm_budget_block_count),
    Figure(
        "warm_budget_used_blocks",
        "Blocks that pins hold or have been promised.",
        lambda _, stats: stats.warm_budget_used_block_count,
    ),
    Figure(
        "waiting_calls",
        "Calls that wait for room: Allocates, Acquires and Leases.",
        lambda served, _: served.admission.waiting_count,
    ),
    Figure(
        "waiting_for_pending",
        "Allocates that wait for blocks which another session is computing.",
        lambda served, _: served.admission.single_flight.waiting_count,
    ),
    Figure("warm_tasks_waiting", "Warm tasks that wait for an engine.", lambda served, _: served.warm.task_counts[0]),
    Figure(
        "warm_tasks_filling", "Warm tasks that an engine is at work on.", lambda served, _: served.warm.task_counts[1]
    ),
    Figure("sessions", "Sessions that have the pool open.", lambda served, _: len(served.sessions)),
    Figure(
        "leased_blocks",
        "Reserved blocks that sessions hold by themselves, outside of sequences.",
        lambda served, _: sum(served.pool.leased_block_count(session.number) for session in served.sessions),
    ),
)

COUNTERS: Final = (
    Figure("allocates", "Allocates granted.", lambda _, stats: stats.counters.allocate_count),
    Figure("hits", "Allocates granted with at least one reused block.", lambda _, stats: stats.counters.hit_count),
    Figure("prompt_tokens", "Prompt tokens of granted Allocates.", lambda _, stats: stats.counters.prompt_token_count),
    Figure(
        "reused_tokens",
        "Of the prompt tokens, those whose KV was there already.",
        lambda _, stats: stats.counters.reused_token_count,
    ),
    Figure(
        "recomputed_tokens",
        "Tokens of published blocks that had been published before and were evicted; estimated from a sample.",
        lambda served, stats: stats.traffic.recomputed_block_count * served.pool.config.block_tokens,
    ),
    Figure("committed_blocks", "Blocks published.", lambda _, stats: stats.counters.committed_block_count),
    Figure(
        "shadow_blocks",
        "Blocks whose content was published already at their commit.",
        lambda _, stats: stats.counters.shadow_block_count,
    ),
    Figure(
        "evicted_blocks",
        "Cached blocks given up for others, or by Evict.",
        lambda _, stats: stats.counters.evicted_block_count,
    ),
    Figure(
        "refusals",
        "Allocates, Acquires, Leases, Extends and Forks refused for want of room.",
        lambda _, stats: stats.counters.refused_count,
    ),
    Figure("room_waits", "Times that a call began to wait for room.", lambda served, _: served.admission.wait_count),
    Figure(
        "recalls",
        "Times that sessions were asked to give leased blocks back, as another one lacked room.",
        lambda served, _: served.page.recall_count,
    ),
    Figure("copied_blocks", "Blocks copied by Fork.", lambda _, stats: stats.counters.copied_block_count),
    Figure(
        "pending_waits",
        "Times that an Allocate began to wait for what another session computes.",
        lambda _, stats: stats.counters.pending_wait_count,
    ),
    Figure(
        "takeovers",
        "Such waits that ended with the caller computing it, as the writer was gone or had committed nothing for 2 s.",
        lambda _, stats: stats.counters.takeover_count,
    ),
)
