"""The paged cache's bookkeeping, with the owner's blocks in the place of its own."""

from collections.abc import Sequence
from typing import Any

from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger

from kvharbor.engines.request_blocks import RequestBlocks
from kvharbor.engines.transformers_cb.admissions import Admitted


class PooledSectors(CachePool):
    """Free blocks are the spare ones of the session. A sector is a block here, and none is free without a lease."""

    def __init__(self, num_sectors: int, held: RequestBlocks) -> None:
        self._held = held
        super().__init__(num_sectors, num_allocators=1)

    def reset(self) -> None:
        """Gives back what no request uses."""
        self.free_sectors: list[int] = []
        self._held.give_back_spare()

    def set_blocks_per_sector(self, index: int, blocks_per_sector: int) -> None:
        """Takes in what `layout_for` has seen to."""
        assert (index, blocks_per_sector) == (0, 1)

    def try_to_free_sectors(self) -> None:
        """Does nothing: there are only blocks."""

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        """Not called: blocks go back by their requests' tables."""
        raise NotImplementedError(index, block_ids)

    def get_free_blocks(self, index: int, num_blocks: int) -> list[int]:
        """Hands out spare blocks."""
        del index
        return self._held.take(num_blocks)

    def count_free_blocks(self, index: int) -> int:
        """Counts what can be handed out now."""
        del index
        return self._held.spare_count


class PooledLedger(BlockLedger):
    """Uses of blocks are counted in RequestBlocks, and contents known to the owner alone."""

    def __init__(self, held: RequestBlocks) -> None:
        super().__init__()
        self._held = held

    def acquire(self, block_id: int) -> None:
        """Counts one more use, by a fork."""
        self._held.share([block_id])


class PooledAllocator(FullAttentionCacheAllocator):
    """Tables of requests over the session's blocks."""

    def __init__(self, held: RequestBlocks, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.ledger = PooledLedger(held)
        self._held = held
        self._published_counts: dict[str, int] = {}

    def begin(self, request_id: str, admitted: Admitted) -> None:
        """Gives a request the table that it was admitted with."""
        self.block_table[request_id] = admitted.table
        self._published_counts[request_id] = admitted.reused_block_count

    def published_count(self, request_id: str) -> int:
        """Returns how many blocks of a request are published, from its start."""
        return self._published_counts.get(request_id, 0)

    def needs_new_sectors(self, request_id: str, past_length: int, query_length: int) -> int:
        """Leases what a request lacks to grow; 0 when it can. Else more than there is, so that nobody tries."""
        missing = self.needs_new_blocks(request_id, past_length, query_length)
        return 0 if self._held.grow(missing, ahead=len(self.block_table)) else self.num_blocks + 1

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Ends a request's use of its blocks. What it has published the owner keeps, `no_cache` or not."""
        del no_cache
        self._published_counts.pop(request_id, None)
        self._held.drop(self.block_table.pop(request_id, []))

    def fork_blocks(self, source_request_id: str, dest_request_id: str, past_length: int) -> Any:
        """Shares full blocks with a fork, and gives it own ones for the rest."""
        copies = super().fork_blocks(source_request_id, dest_request_id, past_length)
        shared = self.count_shareable_blocks(source_request_id, past_length)
        self._published_counts[dest_request_id] = min(shared, self._published_counts.get(source_request_id, 0))
        return copies

    def mark_complete_blocks(self, request_id: str, token_ids: Sequence[int], new_new_blocks: int) -> None:
        """Publishes the blocks that the last step has filled."""
        first = self._published_counts.get(request_id, 0)
        end = min(first + new_new_blocks, len(token_ids) // self.tokens_per_page)
        tokens = token_ids[first * self.tokens_per_page : end * self.tokens_per_page]
        self._held.publish(self.block_table[request_id], first, end, tokens=tokens)
        self._published_counts[request_id] = max(first, end)

    def forget(self) -> None:
        """Takes in that the epoch has ended: no table means anything any more."""
        self.block_table.clear()
        self._published_counts.clear()
