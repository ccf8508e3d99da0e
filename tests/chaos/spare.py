"""Blocks that an engine has leased ahead, and gives back when others need room."""

import threading
from collections.abc import Callable

from chaos.board import Count
from chaos.held import Fence
from kvharbor.client import BlockRun, Pool

_NONE = BlockRun.of(())


class Spare:
    """A stock that the stream's thread may take from while the engine's own does."""

    def __init__(self, pool: Pool, fence: Fence, tally: Callable[..., None]) -> None:
        self._pool = pool
        self._fence = fence
        self._tally = tally
        self._lock = threading.Lock()
        self._blocks = _NONE
        self._epochs = fence.epochs
        pool.blocks.on_recall = self._recalled

    def fill(self, want: int) -> None:
        """Leases up to so many."""
        leased = self._pool.blocks.lease(0, want, growth=True).blocks
        with self._lock:
            self._forget_void()
            self._blocks = BlockRun.join([self._blocks, leased[self._pool.own_blocks.has(leased)]])

    def take(self, most: int) -> BlockRun:
        """Returns up to so many."""
        with self._lock:
            self._forget_void()
            taken, self._blocks = self._blocks[:most], self._blocks[most:]
            return taken

    def release(self) -> None:
        """Gives all back."""
        blocks = self.take(len(self._blocks))
        with self._fence.touching(self._epochs):
            self._pool.blocks.release(blocks)

    def _recalled(self, block_count: int) -> BlockRun:
        given = self.take(block_count)
        self._tally(Count.ENGINE_RECALLS)
        return given

    def _forget_void(self) -> None:
        if self._epochs != self._fence.epochs:
            self._epochs, self._blocks = self._fence.epochs, _NONE
