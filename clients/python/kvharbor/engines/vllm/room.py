"""Leased blocks without content: as many as the engine is about to write to, and few more.

What is left over is given back at the end of every step, and all of it when nothing runs: an engine that keeps blocks
which it does not need has others wait for it [E14]. A few are in store, from which decode steps take without a call
[E27].
"""

import logging
from collections.abc import Callable

from kvharbor.client import Full, PoolExhausted, Unavailable
from kvharbor.engines.vllm.blocks import HarborBlockPool
from kvharbor.engines.vllm.owner import BlockCalls, Store

RUNNING_PER_SPARE = 8
"""A running request needs a block every block_size steps, so a few in store serve many."""

_LOG = logging.getLogger(__name__)


class Room:
    """Leases blocks for what runs, and gives back what is too much."""

    def __init__(
        self,
        pool: HarborBlockPool,
        calls: BlockCalls,
        flush: Callable[[], None],
        make_store: Callable[[], Store | None],
    ) -> None:
        self._pool = pool
        self._calls = calls
        self._make_store = make_store
        self._store: Store | None = None
        self._flush = flush
        self._dry = False
        self._recall_count = calls.status.recall_count
        self.running_count = 0

    @property
    def free_count(self) -> int:
        """Leased blocks without content."""
        count: int = self._pool.free_block_queue.num_free_blocks
        return count

    def begin_step(self, running_count: int) -> None:
        """A step is about to be scheduled, with so many requests running."""
        self.running_count = running_count
        self._dry = False

    def is_settled(self, running_count: int) -> bool:
        """Whether so many ran in the last step too, with a block left for the next one, and nobody wants it.

        `trim` would change nothing then, if nothing is owed.
        """
        free_count = self._pool.free_block_queue.num_free_blocks
        if free_count > 1 or self._dry or not running_count or running_count != self.running_count:
            return False
        status = self._calls.status
        if status.waiting_count or status.recall_count != self._recall_count:
            return False
        store = self._store
        # The store itself has more come when a quarter is gone.
        return free_count == 1 or (store is not None and 4 * len(store) > 3 * store.target_block_count)

    def require(self, count: int, *, growth: bool) -> bool:
        """Has at least so many free blocks, or returns False with no more than before."""
        missing = count - self.free_count
        return missing <= 0 or self._lease(missing, missing, growth=growth)

    def when_empty(self) -> None:
        """Looks for a block when vLLM finds none free: for the next running request that has filled its last one."""
        if self._pool.released:
            # A request has just made place for others.
            self._flush()
            self._dry = False
        if self.running_count and not self._take_from_store() and not self._dry:
            self._dry = not self._lease(1, 1, growth=True)

    def trim(self, owed: int) -> None:
        """Gives back what is more than is owed to requests that are on their way, but for one for the next step."""
        too_many = self.free_count - owed - self._spare_count()
        if too_many > 0:
            self._pool.give_back_free(too_many)
        if not self.running_count:
            if self._store is not None:
                self._store.rest()
        elif too_many < 0 and (store := self._kept_store()) is not None:
            # In time for the next step, which else would have to ask.
            store.stock_up()

    def _spare_count(self) -> int:
        status = self._calls.status
        before, self._recall_count = self._recall_count, status.recall_count
        recalled = self._recall_count != before
        return 0 if recalled or status.waiting_count or not self.running_count else 1

    def _take_from_store(self) -> bool:
        store = self._kept_store()
        if store is None:
            return False
        try:
            self._pool.lend(store.take(1))
        except PoolExhausted:
            return False
        return True

    def _kept_store(self) -> Store | None:
        if self._store is None:
            self._store = self._make_store()
        if self._store is not None:
            self._store.target_block_count = 1 + self.running_count // RUNNING_PER_SPARE
        return self._store

    def _lease(self, least: int, want: int, *, growth: bool) -> bool:
        if self._calls.status.available_block_count < least:
            return False
        try:
            self._pool.lend(self._calls.lease(least, want, growth=growth).blocks)
        except Full:
            return False
        except Unavailable as away:
            _LOG.warning("no blocks to be had: %s", away)
            return False
        return True
