"""transformers' paged cache over a pool's memory, its blocks granted by the owner."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from kvharbor.client import EpochEnded, Namespace, Pool, Unavailable
from kvharbor.engines.request_blocks import RequestBlocks
from kvharbor.engines.step_gate import StepGate
from kvharbor.engines.transformers_cb.admissions import Admissions
from kvharbor.engines.transformers_cb.allocator import PooledAllocator, PooledSectors
from kvharbor.engines.transformers_cb.errors import MemoryUnused
from kvharbor.engines.transformers_cb.memory import ArenaAllocation


@dataclass(slots=True)
class Reuse:
    """Prompt tokens of admitted requests, a request that began again counted again, and how many were in the pool."""

    prompt_tokens: int = 0
    reused_tokens: int = 0


class PooledCache(PagedAttentionCache):
    """A paged cache in the pool's memory. `gate` is closed while anybody must not write to that.

    Keywords are those of the base class. Raises MemoryUnused when that has not taken its memory as expected.
    """

    def __init__(self, pool: Pool, namespace: Namespace, gate: StepGate, reuse: Reuse, **keywords: Any) -> None:
        arena = pool.views.torch_bytes()
        with ArenaAllocation(arena) as allocation:
            super().__init__(**keywords)
        self._require_in_pool(pool, arena, allocation.answered)
        self.held = RequestBlocks(pool.blocks, namespace)
        self.admissions = Admissions(pool.blocks, self.held, namespace, pool.block_tokens)
        self.gate = gate
        self.computing = pool.blocks.computing
        self._calls = pool.blocks
        self._reuse = reuse
        self._returned_before = 0
        self._put_in_place()

    def _put_in_place(self) -> None:
        """Replaces the bookkeeping that the base class has made, which nobody has used yet."""
        own: Any = self.cache_allocators[FULL_ATTENTION]
        self.pool = PooledSectors(self.num_sectors, self.held)
        self._allocator = PooledAllocator(
            self.held,
            index=own.index,
            config=self.config,
            num_key_value_heads=own.num_key_value_heads,
            cache_dtype=own.cache_dtype,
            page_size=own.tokens_per_page,
            layer_indices=own.layer_indices,
            allow_block_sharing=True,
        )
        self._allocator.register_cache_tensor(
            self.bytes_per_sector, self.num_sectors * self.bytes_per_sector, self.cache_tensor, self.pool
        )
        self.cache_allocators = {FULL_ATTENTION: self._allocator}
        self.layer_to_allocator = dict.fromkeys(own.layer_indices, self._allocator)

    def _require_in_pool(self, pool: Pool, arena: Tensor, answered: int) -> None:
        layout = pool.descriptor.layout
        found = {
            "allocations": answered,
            "address": self.cache_tensor.data_ptr(),
            "sector": self.bytes_per_sector,
            "blocks": self.num_sectors + layout.scratch_blocks,
            "shares": self.use_prefix_sharing,
        }
        wanted = {
            "allocations": 1,
            "address": arena.data_ptr(),
            "sector": layout.block_bytes,
            "blocks": pool.descriptor.block_count,
            "shares": True,
        }
        if found != wanted:
            raise MemoryUnused(", ".join(f"{name} {found[name]} for {wanted[name]}" for name in found))

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Admits a request, if there is room for its whole prompt; returns how many tokens need not be computed."""
        if request_id in self._allocator.block_table:
            return 0  # admitted in an earlier step, which was then full; nothing of it was there
        admitted = self.admissions.admit(request_id, prompt_ids)
        if admitted is None:
            return 0
        self._allocator.begin(request_id, admitted)
        reused_tokens = admitted.reused_block_count * self._allocator.tokens_per_page
        self._reuse.prompt_tokens += len(prompt_ids)
        self._reuse.reused_tokens += reused_tokens
        return reused_tokens

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        """Tells whether a step can take these tokens: of a new request if it is admitted, else if it can grow."""
        if state.status == RequestStatus.PENDING and state.request_id not in self._allocator.block_table:
            return False
        if super().can_store_request_tokens(state, request_len, dry_run):
            return True
        # A prompt that waits, with what it may have been granted, must not stand in the way of those that run.
        self.admissions.cancel()
        stored: bool = super().can_store_request_tokens(state, request_len, dry_run)
        return stored

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """Counts how many starved requests could go on, with what others have just given way to."""
        free = self.held.spare_count + self.held.returned_count - self._returned_before
        for count, needed in enumerate(list_blocks_needed):
            free -= needed[FULL_ATTENTION]
            if free < 0:
                return count
        return len(list_blocks_needed)

    def evict_cached_blocks(self) -> bool:
        """Evicts nothing: what is cached is the owner's. Called before requests give way."""
        self._returned_before = self.held.returned_count
        return False

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Ends whatever a request holds or waits for."""
        self.admissions.cancel(request_id)
        self.admissions.ended(request_id, self._allocator.published_count(request_id))
        super().free_blocks(request_id, no_cache)

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        """Publishes what the last step has filled, of a request that is finished with it too."""
        if complete_blocks and state.request_id in self._allocator.block_table:
            tokens: Sequence[int] = state.initial_tokens + state.generated_tokens
            self._allocator.mark_complete_blocks(state.request_id, tokens, complete_blocks[FULL_ATTENTION])

    def prepare_fork_request(self, src_state: RequestState, dst_req_ids: list[str], copy_src_and_dst: Any) -> list[str]:
        """Forks a request as often as there is room for; leases for all at once."""
        needed = self._allocator.count_non_shareable_blocks(src_state.request_id, src_state.current_len())
        try:
            self.held.grow(needed * len(dst_req_ids))
        except EpochEnded:  # the forks wait to be computed, as those do that find no room
            self.held.epoch_ended = True
            return []
        forked: list[str] = super().prepare_fork_request(src_state, dst_req_ids, copy_src_and_dst)
        return forked

    def perform_cache_copy(self, copy_src_and_dst: dict[str, tuple[list[int], list[int]]]) -> None:
        """Copies the partial blocks of forks, within the engine's own."""
        with self.gate.step():
            if not self.held.epoch_ended:
                super().perform_cache_copy(copy_src_and_dst)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """Tells what could be had now: bytes, or as a part of the pool. Makes no call but the first in an epoch."""
        free = self.held.spare_count
        with contextlib.suppress(Unavailable):
            free += self._calls.status.available_block_count
        return free / self.num_sectors if relative else free * self.bytes_per_sector

    def give_back(self) -> None:
        """Ends all holds."""
        self.admissions.cancel()
        self.free_all_requests()
        self.held.give_back_spare()

    def forget(self) -> None:
        """Takes in that the epoch has ended, and all holds with it."""
        self.admissions.forget()
        self._allocator.forget()
        self.held.forget()
