"""Requests of an engine that wait for room, and what becomes of them."""

import contextlib
from collections.abc import Callable

from chaos.board import Count
from chaos.tables import Tables
from kvharbor.client import Acquired, BlockRun, EpochEnded, Grant, Namespace, Unavailable

Asked = tuple[list[int], Namespace]
"""Whole blocks of tokens, and in which namespace."""


class Waits:
    """What is granted goes to `take`, or back where a block of it was let go since it came."""

    def __init__(self, tables: Tables, tally: Callable[..., None], take: Callable[[Asked, Acquired], None]) -> None:
        self._tables = tables
        self._tally = tally
        self._take = take
        self._waiting: list[tuple[Grant, Asked]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, grant: Grant, asked: Asked) -> None:
        """Begins to wait."""
        self._tally(Count.ENGINE_WAITS)
        self._waiting.append((grant, asked))

    def cancel(self) -> None:
        """Ends all waits; `poll` finds what has come before."""
        for grant, _ in self._waiting:
            grant.cancel()

    def poll(self) -> BlockRun:
        """Takes what has come, and returns what it has given back of that. Without an answer nothing will."""
        returned: list[BlockRun] = []
        waiting, self._waiting = self._waiting, []
        for grant, asked in waiting:
            with contextlib.suppress(Unavailable, EpochEnded):
                given = grant.poll()
                if given is None:
                    self._waiting.append((grant, asked))
                elif given.refusal is None:
                    returned.append(self._granted(asked, given))
        if not self._waiting:
            self._tables.released.clear()
        return BlockRun.join(returned)

    def _granted(self, asked: Asked, given: Acquired) -> BlockRun:
        """Takes what was granted, or gives it back; returns what it has given back."""
        self._tally(Count.ENGINE_GRANTS)
        if self._tables.released.isdisjoint(given.held):
            self._take(asked, given)
            return BlockRun.of(())
        blocks = BlockRun.join([given.held, given.leased])
        self._tables.give_back(blocks)
        return blocks
