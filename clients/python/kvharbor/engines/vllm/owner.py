"""What the scheduler's half asks of the service: block calls of the client, as far as they are used here."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvharbor.client import Acquired, BlockRun, Chain, CommitChain, HarborError, Leased


class Status(Protocol):
    """How the pool stands, read without a call."""

    @property
    def available_block_count(self) -> int:
        """Free and cached blocks, less what is promised."""

    @property
    def recall_count(self) -> int:
        """Rises when others need room."""

    @property
    def waiting_count(self) -> int:
        """Calls that wait for room."""


class Store(Protocol):
    """Leased blocks kept for later, refilled in the background: the client's Credits."""

    target_block_count: int

    def __len__(self) -> int: ...

    def take(self, block_count: int) -> BlockRun:
        """Returns so many, without a call, or raises PoolExhausted."""

    def stock_up(self) -> None:
        """Has it refilled, in the background."""

    def rest(self) -> None:
        """Releases all of it, as nothing runs."""


class Computing(Protocol):
    """Whether a step is under way: the client's Computing."""

    def begin(self) -> None:
        """A step has begun."""

    def end(self) -> None:
        """None is under way."""


class BlockCalls(Protocol):
    """`Pool.blocks` of the client; see there."""

    on_refusal: Callable[[HarborError], object] | None

    @property
    def computing(self) -> Computing:
        """What is said of steps that last."""

    @property
    def status(self) -> Status:
        """The pool's status page."""

    def acquire(self, chains: Sequence[Chain], *, wait_s: float = 0.0) -> list[Acquired]:
        """Holds what is there of prompts, and leases the rest of each."""

    def lease(self, least: int, want: int, *, growth: bool = False) -> Leased:
        """Leases fresh blocks, all or nothing below `least`."""

    def commit(self, chains: Sequence[CommitChain]) -> None:
        """Publishes blocks; not awaited."""

    def abandon(self, chains: Sequence[Chain]) -> None:
        """Says that chains are not computed any more; not awaited."""

    def release(self, blocks: BlockRun) -> None:
        """Ends holds; not awaited."""

    def bump_namespace(self, version: str = "") -> str:
        """Moves the session to another version of its weights."""
