"""Refusals for want of room: what they say to who waits."""

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


def _numbers(refused: PoolExhausted) -> tuple[int, int]:
    needed, left = (int(str(refused.attributes[name])) for name in ("needed_block_count", "available_block_count"))
    return needed, left
