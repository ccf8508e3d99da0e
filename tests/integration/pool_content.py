"""What a pool of a client has: put there by a sequence, and counted by class."""

from typing import Any


def classes(pool: Any) -> tuple[int, int, int, int]:
    """Free, reserved, active and cached blocks."""
    stats = pool.stats()
    return stats.free_block_count, stats.reserved_block_count, stats.active_block_count, stats.cached_block_count


def put(pool: Any, tokens: Any, **options: Any) -> None:
    """Allocates, commits and releases a prompt."""
    with pool.allocate(tokens, **options) as held:
        held.commit(len(tokens))
