"""Block calls of an engine that copies, and computes where the pool is out of reach [E16].

While the service is away, and between two epochs, it is told so, as by the calls themselves. What ends the session for
good, as when the pool cannot be opened anew, is a pool without room and without content to it from then on.
"""

import logging
import secrets
from collections.abc import Sequence

from kvharbor.client import (
    Acquired,
    BlockCalls,
    BlockRun,
    Chain,
    CommitChain,
    EpochEnded,
    HarborError,
    Leased,
    PoolExhausted,
    Unavailable,
)

_LOG = logging.getLogger(__name__)


class SparedCalls:
    """What an engine that copies uses of `calls`. Nothing but EpochEnded, Unavailable and PoolExhausted is raised."""

    def __init__(self, calls: BlockCalls) -> None:
        self.computing = calls.computing
        self._calls = calls
        self._told = ""

    def acquire(self, chains: Sequence[Chain]) -> list[Acquired]:
        """Holds what is there of chains."""
        try:
            return self._calls.acquire(chains)
        except (EpochEnded, Unavailable):
            raise
        except HarborError as refused:
            self._tell(refused)
            return [Acquired()] * len(chains)

    def lease(self, least: int, want: int, *, growth: bool = False) -> Leased:
        """Leases fresh blocks, all or nothing below `least`."""
        try:
            return self._calls.lease(least, want, growth=growth)
        except (EpochEnded, Unavailable, PoolExhausted):
            raise
        except HarborError as refused:
            self._tell(refused)
            raise PoolExhausted(f"nothing is to be had: {refused}") from refused

    def commit(self, chains: Sequence[CommitChain]) -> None:
        """Publishes blocks."""
        try:
            self._calls.commit(chains)
        except EpochEnded:
            raise
        except HarborError as refused:
            self._tell(refused)

    def abandon(self, chains: Sequence[Chain]) -> None:
        """Says that chains are not computed any more."""
        try:
            self._calls.abandon(chains)
        except EpochEnded:
            raise
        except HarborError as refused:
            self._tell(refused)

    def release(self, blocks: BlockRun) -> None:
        """Ends holds."""
        try:
            self._calls.release(blocks)
        except EpochEnded:
            raise
        except HarborError as refused:
            self._tell(refused)

    def leave_version(self) -> str:
        """Moves the session to a version of its own; returns what its chains have to name for that.

        Nothing, where the service has done so. Out of its reach the engine makes up a name, of which it knows nothing.
        """
        try:
            self._calls.bump_namespace()
        except HarborError as refused:
            self._tell(refused)
            return secrets.token_hex(16)
        return ""

    def _tell(self, refused: HarborError) -> None:
        # Once, and not at every step.
        if (text := str(refused)) != self._told:
            self._told = text
            _LOG.error("the engine goes on without the pool: %s", text)
