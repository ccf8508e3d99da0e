"""Leased blocks that are kept for later use, so that taking one is no call [C19]."""

import threading
import time
import weakref
from typing import TYPE_CHECKING

from kvharbor.client.errors import HarborError, InvalidField, PoolExhausted
from kvharbor.client.outbox import Outgoing
from kvharbor.client.runs import NO_BLOCKS, BlockRun
from kvharbor.client.unanswered import Answer

if TYPE_CHECKING:
    from kvharbor.client.pool import Pool

PAUSE_S = 0.1
"""After a recall, or a refill that brought nothing, before more is asked for than is needed at once."""
IDLE_S = 1.0


class Credits:
    """A stock of leased blocks of one pool, refilled in the background to `target_block_count`. Threads may share it.

    When others need room they get it back at once, in a thread of the harbor's, and all of it goes back when it was
    not used for `idle_s`: nothing was taken, and no batch has stepped with it. What was taken is its taker's, held by
    the session until it is released or has become part of a sequence.

    A refill takes its time, in which more are taken: for a batch have two blocks a sequence, so that all of them may
    need one in the same step.
    """

    def __init__(self, pool: "Pool", target_block_count: int, *, idle_s: float = IDLE_S) -> None:
        if target_block_count < 1:
            raise InvalidField.of("target_block_count", target_block_count, limit="1 or more", remedy="correct it")
        self.target_block_count = target_block_count
        self._pool = pool
        self._stock = NO_BLOCKS
        self._asking = False
        self._resting = False
        self._quiet_until_s = 0.0
        self._used_at_s = time.monotonic()
        self._idle_s = idle_s
        self._stopped = threading.Event()
        held = pool.blocks.held
        held.stream.require_session()
        with pool.link.guard:
            held.stocks.add(self)
            self._refill()
        threading.Thread(
            target=_watch, args=(weakref.ref(self), self._stopped, idle_s), name="kvharbor-credits", daemon=True
        ).start()

    def __len__(self) -> int:
        return len(self._stock)

    def take(self, block_count: int) -> BlockRun:
        """Returns so many blocks out of the stock; makes no call. Raises PoolExhausted when it has less."""
        with self._pool.link.guard:
            available = len(self._stock)
            if block_count > available:
                self.keep()
                raise PoolExhausted(
                    f"{block_count} blocks are needed and {available} are in stock: call `require`, or preempt a "
                    f"request and release its blocks",
                    metadata={"neededBlockCount": str(block_count), "availableBlockCount": str(available)},
                )
            taken = self.draw(block_count)
            self.keep()
            return taken

    def draw(self, block_count: int) -> BlockRun:
        """Returns so many that are there; for a batch, which calls `keep` behind it, both under the guard."""
        taken, self._stock = self._stock[:block_count], self._stock[block_count:]
        return taken

    def keep(self) -> None:
        """Takes in that the stock is in use, and has it refilled when a quarter of it is gone; under the guard."""
        self._resting = False
        self._used_at_s = time.monotonic()
        if 4 * len(self._stock) <= 3 * self.target_block_count:
            self._refill()

    def stock_up(self) -> None:
        """Has it refilled in the background, for who is about to need some; makes no call that is waited for."""
        with self._pool.link.guard:
            self.keep()

    def rest(self) -> None:
        """Releases all of it, and what a refill on its way brings: nothing runs until more is asked for."""
        with self._pool.link.guard:
            self._resting = True
            self._return(len(self._stock))

    def require(self, block_count: int, *, timeout_s: float | None = None) -> None:
        """Has so many blocks in stock, by a call for growth if there are less; raises PoolExhausted, Unavailable."""
        missing = block_count - len(self._stock)
        if missing <= 0:
            return
        want = max(missing, self.target_block_count - len(self._stock))

        def make(answer: Answer) -> Outgoing:
            def take(leased: BlockRun) -> None:
                self._add(leased)
                answer.set(None)

            self._resting = False
            return self._pool.blocks.held.growing(want, take, answer.fail, least=missing)

        self._pool.blocks.held.stream.ask(make, timeout_s)

    def give_back(self, block_count: int) -> int:
        """Releases up to so many, for others; returns how many."""
        with self._pool.link.guard:
            self._quiet_until_s = time.monotonic() + PAUSE_S
            count = min(block_count, len(self._stock))
            self._return(count)
            return count

    def lose(self, lost: BlockRun) -> None:
        """Takes in that the session does not hold these any more; for the harbor."""
        self._stock = self._stock[~self._stock.among(lost)]

    def close(self) -> None:
        """Releases the stock, for good. Repeating it does nothing."""
        # In one step, or a refill that has just looked would put its blocks in stock behind this.
        with self._pool.link.guard:
            self._stopped.set()
            self._return(len(self._stock))

    def _refill(self) -> None:
        missing = self.target_block_count - len(self._stock)
        if missing <= 0 or self._asking or self._stopped.is_set() or time.monotonic() < self._quiet_until_s:
            return
        self._asking = True
        held = self._pool.blocks.held
        held.stream.put(held.growing(missing, self._refilled, self._not_refilled))

    def _refilled(self, leased: BlockRun) -> None:
        self._asking = False
        if not len(leased):
            self._quiet_until_s = time.monotonic() + PAUSE_S
        self._add(leased)

    def _not_refilled(self, _: HarborError) -> None:
        # Who needs blocks that are not there is told why by `require`.
        self._asking = False
        self._quiet_until_s = time.monotonic() + PAUSE_S

    def _add(self, leased: BlockRun) -> None:
        if self._stopped.is_set() or self._resting:
            self._pool.blocks.held.release(leased)
        else:
            self._stock = BlockRun.join([self._stock, leased])

    def return_idle(self) -> None:
        """Gives all back if it was not used for a while; for its thread."""
        with self._pool.link.guard:
            if time.monotonic() - self._used_at_s >= self._idle_s:
                self._return(len(self._stock))

    def _return(self, block_count: int) -> None:
        kept = len(self._stock) - block_count
        self._stock, returned = self._stock[:kept], self._stock[kept:]
        self._pool.blocks.held.release(returned)


def _watch(reference: "weakref.ref[Credits]", stopped: threading.Event, idle_s: float) -> None:
    """Runs in the thread, and keeps nothing alive that its owner has forgotten."""
    while not stopped.wait(idle_s):
        credits = reference()
        if credits is None:
            return
        credits.return_idle()
        del credits
