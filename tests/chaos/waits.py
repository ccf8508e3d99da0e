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

    def poll(self) -> None:
        """Takes what has come. Without an answer nothing will."""
        waiting, self._waiting = self._waiting, []
        for grant, asked in waiting:
            with contextlib.suppress(Unavailable, EpochEnded):
                given = grant.poll()
                if given is None:
                    self._waiting.append((grant, asked))
                elif given.refusal is None:
                    self._granted(asked, given)
        if not self._waiting:
            self._tables.released.clear()

    def _granted(self, asked: Asked, given: Acquired) -> None:
        self._tally(Count.ENGINE_GRANTS)
        if self._tables.released.isdisjoint(given.held):
            self._take(asked, given)
        else:
            self._tables.give_back(BlockRun.join([given.held, given.leased]))
