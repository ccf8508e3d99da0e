"""A sequence with its tokens: what to write and to compare is known from them alone."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from chaos.stamps import BLOCK_TOKENS, stamps, verify, write
from kvharbor.client import EpochEnded, Pool, Unavailable
from kvharbor.client import Sequence as PoolSequence


class WrongBytes(Exception):
    """A held token's KV is not what it must be."""


class Fence:
    """Keeps a new epoch's memory away while bytes of the old one are being touched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.epochs = 0

    def move(self) -> None:
        """Ends the epoch; returns once nothing of it is touched any more."""
        with self._lock:
            self.epochs += 1

    @contextlib.contextmanager
    def touching(self, epochs: int) -> Iterator[None]:
        """Lets bytes be touched within that epoch; raises EpochEnded in another."""
        with self._lock:
            if self.epochs != epochs:
                raise EpochEnded("the memory is of another epoch")
            yield


@dataclass(slots=True, eq=False)
class Held:
    """`tokens` are all that the sequence has, whether a call failed or not. `epochs` are those of its fence.

    `variant` is that of its stamps.
    """

    sequence: PoolSequence
    tokens: list[int]
    fence: Fence
    epochs: int
    variant: str = ""
    _unanswered: tuple[int, list[int]] | None = field(default=None, init=False)

    def compute(self, pool: Pool, computed_tokens: int, new_tokens: Sequence[int] = ()) -> None:
        """Writes and commits all tokens up to `computed_tokens`; extends the sequence where it has no room.

        A commit that ended without an answer is repeated first, as the client wants it.
        """
        if self._unanswered is not None:
            self._commit(*self._unanswered)
        known = [*self.tokens, *new_tokens]
        if len(known) > self.sequence.capacity_tokens:
            self.sequence.extend(len(known) - self.sequence.capacity_tokens)
        computed_tokens = max(computed_tokens, self.sequence.computed_tokens)
        with self.fence.touching(self.epochs):
            first = self.sequence.computed_tokens
            write(
                pool, self.sequence.slots(first, computed_tokens), stamps(known[:computed_tokens], self.variant)[first:]
            )
        self._commit(computed_tokens, known)

    def verify(self, pool: Pool) -> int:
        """Compares every computed byte; returns how many whole blocks that were. Raises WrongBytes."""
        with self.fence.touching(self.epochs):
            end = self.sequence.computed_tokens
            wrong = verify(pool, self.sequence.slots(0, end), stamps(self.tokens[:end], self.variant))
        if wrong is not None:
            # It may have been lost in the meantime: then this raises why.
            self.sequence.slots(0, 0)
            raise WrongBytes(f"{self.sequence!r} of generations {self.sequence.generations}: {asdict(wrong)}")
        return self.sequence.computed_tokens // BLOCK_TOKENS

    def _commit(self, computed_tokens: int, known: list[int]) -> None:
        self._unanswered = None
        try:
            self.sequence.commit(computed_tokens, known[len(self.tokens) :])
        except Unavailable:
            self._unanswered = computed_tokens, known
            raise
        self.tokens = known
