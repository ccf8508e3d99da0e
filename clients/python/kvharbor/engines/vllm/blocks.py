"""vLLM's block pool, with contents and room that come from the service.

vLLM's classes go on counting who of the engine's own requests uses which block. What differs from vLLM's own pool:

- *Free* are only blocks that the session has leased and that have no content [E21]. A cached block without a user is
  not kept here: it is released, and the service keeps it, for this engine and for others.
- A hit is a block that the session holds already. It comes by `adopt` with one reference, the caller's.
- A block with a hash is indexed here at once, as vLLM does, and published when the step that fills it has run. Until
  then it stays, even without a user.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

from kvharbor.client import BlockRun
from kvharbor.engines.vllm.errors import ContractBroken

GROUP = 0
"""There is one group of layers, which all share the block tables."""

_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """Consecutive blocks of a request that a step fills, behind `parent`; the first of its prompt has none.

    As (block, generation) of the moment when they were given their hashes.
    """

    request_id: str
    parent: _Pair | None
    pairs: tuple[_Pair, ...]
    keys: tuple[bytes, ...]


class HarborBlockPool(BlockPool):  # type: ignore[misc]
    """Takes the place of `like`. What is to be released or published is taken from it. Not for several threads.

    `when_empty` is called where vLLM finds no free block, and may lend some; `when_reset` where it wants its prefix
    cache reset. `available_elsewhere` tells how many blocks are to be had from the service.
    """

    def __init__(self, like: BlockPool) -> None:
        super().__init__(
            num_gpu_blocks=like.num_gpu_blocks,
            enable_caching=True,
            hash_block_size=like.hash_block_size,
            metrics_collector=like.metrics_collector,
        )
        for block in self.blocks:
            block.prev_free_block = block.next_free_block = None
        self.free_block_queue = FreeKVCacheBlockQueue([])
        self.held: dict[int, int] = {}
        self.outdated_requests: set[str] = set()
        self.when_empty: Callable[[], object] | None = None
        self.when_reset: Callable[[], object] | None = None
        self.available_elsewhere: Callable[[], int] = int
        self.filled: list[Filled] = []
        """What is to be published, in the order of parents before children."""
        self.released: list[_Pair] = []
        """What the session needs not hold any more, what is to be evicted first in front."""
        self._unpublished: set[int] = set()

    # What comes from the service

    def lend(self, run: BlockRun) -> None:
        """Takes in leased blocks: they are free."""
        blocks = [self._taken(*pair) for pair in run]
        self.free_block_queue.append_n(blocks)

    def adopt(self, run: BlockRun, keys: Sequence[BlockHash]) -> list[KVCacheBlock]:
        """Takes in committed blocks that the session holds now, the first ones of a prompt; each gets one reference."""
        adopted = []
        for index, (block_id, generation) in enumerate(run):
            block = self.blocks[block_id]
            key = make_block_hash_with_group_id(keys[index], GROUP)
            if block_id not in self.held:
                self._taken(block_id, generation)
                self._insert_block_hash(key, block, num_tokens=(index + 1) * self.hash_block_size)
            elif self.held[block_id] != generation or block.block_hash not in (key, None):
                raise ContractBroken(f"block {block_id} is granted as {key.hex()}, and held here as {block}")
            block.ref_cnt += 1
            adopted.append(block)
        return adopted

    def pin_hits(self, keys: Sequence[BlockHash]) -> list[KVCacheBlock]:
        """Takes a reference on each of the first blocks that are here already; returns them."""
        hits = []
        for key in keys:
            found = self.get_cached_block(key, [GROUP])
            if found is None:
                break
            hits.append(found[0])
        self.touch(hits)
        return hits

    def hit_count(self, keys: Sequence[BlockHash]) -> int:
        """Returns how many of the first blocks are here already."""
        for count, key in enumerate(keys):
            if not self.knows(key):
                return count
        return len(keys)

    def knows(self, key: BlockHash) -> bool:
        """Whether a block of this content is here."""
        return self.get_cached_block(key, [GROUP]) is not None

    def is_published(self, block: KVCacheBlock) -> bool:
        """Whether the service knows what is in a block of the index."""
        return block.block_id not in self._unpublished

    # What goes to the service

    def take_filled(self) -> list[Filled]:
        """Returns what has been given hashes since the last call."""
        filled, self.filled = self.filled, []
        return filled

    def published(self, filled: Iterable[Filled]) -> None:
        """Takes in that these are sent to be published: blocks among them that nobody uses go back."""
        for each in filled:
            for block_id, _ in reversed(each.pairs):
                self._unpublished.discard(block_id)
                block = self.blocks[block_id]
                if not block.ref_cnt and block_id in self.held:
                    self._give_back(block)

    def withdraw(self, filled: Filled) -> None:
        """Takes hashes away again: the step that was to fill these blocks does not."""
        for block_id, _ in filled.pairs:
            block = self.blocks[block_id]
            self._unpublished.discard(block_id)
            self._maybe_evict_cached_block(block)
            if not block.ref_cnt:
                self.free_block_queue.prepend_n([block])

    def take_released(self) -> BlockRun:
        """Returns what is to be released since the last call."""
        released, self.released = self.released, []
        return BlockRun.of(released)

    def give_back_free(self, count: int) -> None:
        """Gives back so many free blocks, those that would be used last."""
        for _ in range(count):
            block = self.free_block_queue.fake_free_list_tail.prev_free_block
            assert block is not None
            self.free_block_queue.remove(block)
            self._give_back(block)

    def outdate(self, request_ids: Iterable[str]) -> None:
        """Forgets all hashes: the weights are others. The requests that run on old blocks publish no more.

        What was to be published is not; what is not in use goes back.
        """
        self.outdated_requests = set(request_ids)
        self.filled.clear()
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        for block_id in self._unpublished:
            block = self.blocks[block_id]
            block.reset_hash()
            if not block.ref_cnt:
                self.free_block_queue.prepend_n([block])
        self._unpublished.clear()
        if self.metrics_collector:
            self.metrics_collector.reset()

    # What vLLM calls

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Adds a reference; a block with a hash is never in the free queue."""
        for block in blocks:
            if block.is_null:
                continue
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)

    def get_num_free_blocks(self) -> int:
        """Returns how many blocks can be had at once."""
        count: int = self.free_block_queue.num_free_blocks
        if not count and self.when_empty is not None:
            self.when_empty()
            count = self.free_block_queue.num_free_blocks
        return count

    def get_usage(self) -> float:
        """Returns which part of the pool is in use, by this engine and others."""
        free: int = self.free_block_queue.num_free_blocks
        usable: int = self.num_gpu_blocks - 1
        return 1.0 - (free + self.available_elsewhere()) / usable

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Indexes full blocks, and notes them to be published."""
        if num_cached_blocks >= num_full_blocks or request.request_id in self.outdated_requests:
            return
        super().cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
        )
        full = [block.block_id for block in blocks[num_cached_blocks:num_full_blocks]]
        parent = blocks[num_cached_blocks - 1].block_id if num_cached_blocks else None
        self._unpublished.update(full)
        self.filled.append(
            Filled(
                request.request_id,
                None if parent is None else (parent, self.held[parent]),
                tuple((block_id, self.held[block_id]) for block_id in full),
                tuple(request.block_hashes[num_cached_blocks:num_full_blocks]),
            )
        )

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Takes a reference from each; what has no user and no content is free, else it goes back once published."""
        free = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt:
                continue
            if block.block_hash is None:
                free.append(block)
            elif self.is_published(block):
                self._give_back(block)
        self.free_block_queue.prepend_n(free)

    def reset_prefix_cache(self) -> bool:
        """Has the session move to another version of its weights; what runs goes on, and publishes no more."""
        if self.when_reset is None:
            return False
        self.when_reset()
        return True

    def unpin_blocks(self, *_: Any, **__: Any) -> None:
        """Is not used by what is supported."""
        raise ContractBroken("blocks without a user are not kept here")

    def move_block_hashes(self, *_: Any, **__: Any) -> None:
        """Is not used by what is supported."""
        raise ContractBroken("what a block holds does not move")

    def cache_partial_block(self, *_: Any, **__: Any) -> Any:
        """Is not used by what is supported."""
        raise ContractBroken("only whole blocks are shared")

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Is called for KV connectors only, which are refused."""
        raise ContractBroken(f"vLLM takes back what was published in blocks {sorted(block_ids)}")

    # Inside

    def _taken(self, block_id: int, generation: int) -> KVCacheBlock:
        block = self.blocks[block_id]
        if block_id in self.held or block.ref_cnt or block.is_null:
            raise ContractBroken(f"block {block_id} is granted, and in use here: {block}")
        self.held[block_id] = generation
        return block

    def _give_back(self, block: KVCacheBlock) -> None:
        self._maybe_evict_cached_block(block)
        self.released.append((block.block_id, self.held.pop(block.block_id)))
