"""The session's blocks in this engine: how many of its requests use each, and which are spare.

The owner counts a block once for the session, however many requests share it here. So it is given back when the
last of them lets go of it: a published one to the owner, who keeps it cached, a leased one to the spare ones, which
serve the next request that grows. Spare ones go back when nothing runs, and when others need them.
"""

import contextlib
import threading
from collections.abc import Iterable, Sequence

from kvharbor.client import BlockCalls, BlockRun, Chain, CommitChain, EpochEnded, Namespace, PoolExhausted, Unavailable
from kvharbor.engines.spared_calls import SparedCalls

MOST_AHEAD = 8
"""At most so many are leased beyond what is needed now [E14]: each saves a running request one round trip."""


class RequestBlocks:
    """What the requests of one engine hold of a pool, as one session. One thread uses it; `recall` is for any."""

    def __init__(self, calls: BlockCalls | SparedCalls, namespace: Namespace) -> None:
        self.epoch_ended = False
        """Nothing is told or asked of any more, until `forget`. Whoever learns of it may set it, in any thread."""
        self.returned_count = 0
        self.namespace = namespace
        """Of what is published from now on."""
        self._calls = calls
        self._generations: dict[int, int] = {}
        self._use_counts: dict[int, int] = {}
        self._published: set[int] = set()
        # Only these two are seen by other threads.
        self._lock = threading.Lock()
        self._spare: list[int] = []
        self._promised = 0

    @property
    def spare_count(self) -> int:
        """Leased blocks that no request uses."""
        return len(self._spare)

    @property
    def used_count(self) -> int:
        """Blocks that requests use, each once."""
        return len(self._use_counts)

    def adopt(self, held: BlockRun, leased: BlockRun) -> list[int]:
        """Makes a request's table of what was acquired for it: what is published first, then what is to be written."""
        table: list[int] = []
        for run in (held, leased):
            self._note(run)
            table += run.block_ids.tolist()
        self._published.update(table[: len(held)])
        for block_id in table:
            self._use_counts[block_id] = self._use_counts.get(block_id, 0) + 1
        return table

    def keep(self, leased: BlockRun) -> None:
        """Takes in spare blocks that were acquired with a prompt, for what is computed of it."""
        self._note(leased)
        with self._lock:
            self._spare.extend(leased.block_ids.tolist())

    def give_back(self, held: BlockRun, leased: BlockRun) -> None:
        """Returns what was acquired for a request that has gone; what other requests use stays."""
        for block_id, generation in held:
            if block_id not in self._use_counts:
                self._generations[block_id] = generation
        self._note(leased)
        unused = [block_id for block_id in held.block_ids.tolist() if block_id not in self._use_counts]
        self._release([*unused, *leased.block_ids.tolist()][::-1])

    def grow(self, block_count: int, ahead: int = 0) -> bool:
        """Sees to it that a `take` of so many succeeds next; returns False when the pool has no room for that.

        When it has to ask for some it asks for up to `ahead` more.
        """
        with self._lock:
            short = block_count - len(self._spare)
            # Those too that are still to come: they may be asked back as soon as they are here.
            self._promised = block_count
        if short > 0 and not self._lease(short, short + min(ahead, MOST_AHEAD)):
            self._promised = 0
            return False
        return True

    def take(self, block_count: int) -> list[int]:
        """Gives spare blocks to a request."""
        with self._lock:
            taken = [self._spare.pop() for _ in range(block_count)]
            self._promised = max(0, self._promised - block_count)
        self._use_counts.update(dict.fromkeys(taken, 1))
        return taken

    def take_some(self, block_count: int, ahead: int = 0) -> list[int]:
        """Gives up to so many blocks to a request: spare ones, and others while nobody waits for room."""
        short = block_count - self.spare_count
        if short > 0:
            self._lease(0, short + ahead, growth=False)
        with self._lock:
            taken, self._spare = self._spare[:block_count], self._spare[block_count:]
        self._use_counts.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Has one more request use them."""
        for block_id in block_ids:
            self._use_counts[block_id] += 1

    def drop(self, table: Sequence[int]) -> None:
        """Ends a request's use of its blocks [E12]."""
        unused: list[int] = []
        for block_id in reversed(table):  # the owner evicts first what is named first
            self._use_counts[block_id] -= 1
            if not self._use_counts[block_id]:
                del self._use_counts[block_id]
                unused.append(block_id)
        with self._lock:
            self._spare.extend(block_id for block_id in unused if block_id not in self._published)
        self._release([block_id for block_id in unused if block_id in self._published])

    def publish(
        self, table: Sequence[int], first: int, end: int, *, tokens: Sequence[int] = (), keys: bytes = b""
    ) -> None:
        """Commits blocks `first` to `end` of a table, whose KV is written: `tokens` or `keys` of just these.

        Not awaited [E10]. A block whose content another has published meanwhile stays this request's own until it is
        dropped.
        """
        if first >= end or self.epoch_ended:
            return
        chain = CommitChain(
            parent=self._run(table[max(first - 1, 0) : first]),
            blocks=self._run(table[first:end]),
            tokens=tokens,
            keys=keys,
            namespace=self.namespace,
        )
        self._published.update(table[first:end])
        try:
            self._calls.commit([chain])
        except EpochEnded:
            self.epoch_ended = True

    def abandon(self, chains: Sequence[Chain]) -> None:
        """Tells others that chains are not computed here any more [E18]."""
        if self.epoch_ended:
            return
        try:
            self._calls.abandon(chains)
        except EpochEnded:
            self.epoch_ended = True

    def give_back_spare(self, most_kept: int = 0) -> None:
        """Returns spare blocks to the owner but for `most_kept`."""
        with self._lock:
            surplus, self._spare = self._spare[most_kept:], self._spare[:most_kept]
        self._release(surplus)

    def recall(self, block_count: int) -> BlockRun:
        """Takes up to so many blocks out of the spare ones [E14], to be released by the caller: the client's thread."""
        with self._lock:
            kept = max(self._promised, len(self._spare) - block_count)
            recalled, self._spare = self._spare[kept:], self._spare[:kept]
            return self._run(recalled)

    def require_epoch(self, *came: BlockRun) -> None:
        """Raises EpochEnded between the end of an epoch and `forget`; gives back what has come of the new one."""
        if self.epoch_ended:
            with contextlib.suppress(EpochEnded):
                self._calls.release(BlockRun.join(came))
            raise EpochEnded("the epoch has ended with all that was held: begin again")

    def forget(self) -> None:
        """Takes in that the epoch has ended, and all holds with it."""
        with self._lock:
            self._spare.clear()
            self._promised = 0
        self._generations.clear()
        self._use_counts.clear()
        self._published.clear()
        self.epoch_ended = False

    def _lease(self, least: int, want: int, *, growth: bool = True) -> bool:
        self.require_epoch()
        try:
            leased = self._calls.lease(least, want, growth=growth)
        except (PoolExhausted, Unavailable):
            return False
        self.require_epoch(leased.blocks)
        self.keep(leased.blocks)
        return True

    def _note(self, run: BlockRun) -> None:
        self._generations.update(run)

    def _release(self, block_ids: Sequence[int]) -> None:
        if not block_ids or self.epoch_ended:
            return
        self._published.difference_update(block_ids)
        self.returned_count += len(block_ids)
        try:
            self._calls.release(self._run(block_ids))
        except EpochEnded:
            self.epoch_ended = True

    def _run(self, block_ids: Sequence[int]) -> BlockRun:
        return BlockRun.of((block_id, self._generations[block_id]) for block_id in block_ids)
