"""What block calls give: blocks that are held then, and waits for some."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvharbor.client import refusals
from kvharbor.client.durations import seconds
from kvharbor.client.errors import HarborError
from kvharbor.client.pending import Pending
from kvharbor.client.runs import NO_BLOCKS, BlockRun, run_of
from kvharbor.v1 import blocks_pb2


@dataclass(frozen=True, slots=True, eq=False)
class Acquired:
    """What one chain was given: all held by the session now.

    `held` is the longest committed run of its blocks, readable; `leased` are fresh ones to write. `pending` tells what
    another session is computing right behind the held ones. With a `refusal` nothing is held for it: RequestTooLarge
    means for ever, PoolExhausted now, or that it stands behind a chain that does not fit. `waiting`: it waits for room,
    and `grant` tells what comes. A chain `unless_pending` that `stands_back` was given nothing, for the pending one:
    ask again a little later.
    """

    held: BlockRun = NO_BLOCKS
    leased: BlockRun = NO_BLOCKS
    pending: Pending | None = None
    waiting: bool = False
    refusal: HarborError | None = None
    grant: "Grant | None" = None
    stands_back: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Leased:
    """Fresh blocks to write, held by the session now; none while `grant` waits for them."""

    blocks: BlockRun
    grant: "Grant | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class Invalidated:
    """What came of an invalidate, one entry a block of it in `refusals`: BlockHeld, BlockNotHeld, or None.

    `leased` are the blocks that were taken back, those behind the named ones included, in their new generations;
    `before` has them as they were.
    """

    leased: BlockRun
    before: BlockRun
    refusals: tuple[HarborError | None, ...] = field(default=())


class Grant:
    """A wait for room. It ends with `poll`'s answer, or by `cancel`; forgetting it gives nothing back [C1]."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self._outcome: Acquired | None = None
        self._error: HarborError | None = None

    def poll(self) -> Acquired | None:
        """Returns what was granted, None while it waits; with a `refusal` the wait is over without it.

        Makes no call. Raises Unavailable where the service's process has ended meanwhile, EpochEnded, and what else the
        harbor has ended by: nothing is held of it then.
        """
        if self._error is not None:
            raise self._error
        return self._outcome

    def cancel(self) -> None:
        """Ends the wait; what is granted on the way is given back. Not awaited, and may be repeated."""
        self._cancel()

    def end(self, outcome: Acquired | HarborError) -> None:
        """Takes in how the wait has ended; for the one who made it."""
        if isinstance(outcome, HarborError):
            self._error = outcome
        else:
            self._outcome = outcome


def acquired(result: blocks_pb2.AcquireResult) -> Acquired:
    """Reads the result of a chain, but for its grant."""
    pending = None
    if result.HasField("pending"):
        told = result.pending
        pending = Pending(told.token_count, told.session_id, seconds(told.idle))
    return Acquired(
        held=run_of(result.held),
        leased=run_of(result.leased),
        pending=pending,
        waiting=result.waiting,
        stands_back=result.stands_back,
        refusal=refusals.from_item(result.status) if result.status.code else None,
    )


def waiting_by(grant: Grant, result: Acquired) -> Acquired:
    """Returns a result that waits, with what tells of its end."""
    return replace(result, grant=grant)
