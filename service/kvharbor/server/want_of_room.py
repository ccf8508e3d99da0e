"""Refusals for want of room: what they say to who waits, and that of one who is not even tried."""

from kvharbor.pool import Pool
from kvharbor.pool.errors import PoolExhausted


def missing(refused: PoolExhausted) -> int:
    """Returns how many blocks a request lacked, at least 1."""
    needed, left = _numbers(refused)
    return max(needed - left, 1)


def shortage(pool: Pool, refused: PoolExhausted) -> int:
    """Returns how many must be available for another try: matched ones that nobody holds count too."""
    needed, left = _numbers(refused)
    return needed + max(pool.available_block_count - left, 0)


def full(pool: Pool, needed_blocks: int) -> PoolExhausted:
    """Returns the refusal of one who may not pass those that wait."""
    stats = pool.stats()
    return PoolExhausted(
        needed_block_count=needed_blocks,
        available_block_count=0,
        free_block_count=stats.free_block_count,
        cached_block_count=stats.cached_block_count,
        reserved_block_count=stats.reserved_block_count,
        active_block_count=stats.active_block_count,
        warm_block_count=stats.warm_block_count,
        quarantined_block_count=stats.quarantined_block_count,
        usable_block_count=stats.total_block_count,
    )


def _numbers(refused: PoolExhausted) -> tuple[int, int]:
    needed, left = (int(str(refused.attributes[name])) for name in ("needed_block_count", "available_block_count"))
    return needed, left
