"""Prompts get all of their blocks at once, in order, and wait without holding any [E11].

A prompt that holds a part of what it needs while it waits for the rest would keep it from another engine's that
does the same. So a prompt is admitted with its whole table, or not at all; the first that does not fit takes a place
in the owner's queue, and those behind it wait until it is through. One that another engine is computing stands back
[W8], and nobody waits behind it; so others are told when one is not computed here after all [E18].
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from kvharbor.client import (
    Acquired,
    BlockCalls,
    BlockRun,
    CallerMistake,
    Chain,
    Grant,
    HarborError,
    Namespace,
    PoolExhausted,
    Unavailable,
)
from kvharbor.engines.announced import Announced
from kvharbor.engines.request_blocks import RequestBlocks

WAIT_S = 60.0
"""How long a place in the owner's queue is kept; then another is taken."""
STAND_BACK_S = 0.01
"""Before one of the prompts is asked for again that another engine is computing, the longer the more there are."""
MOST_PAUSE_S = 1.0
"""But no longer: all that they wait for may have come at once."""
_NOTHING = BlockRun.of(())
_NOT_NOW = Acquired(refusal=PoolExhausted("no blocks just now"))


@dataclass(frozen=True, slots=True)
class Admitted:
    """A prompt's table, and how many blocks from its start need not be computed."""

    table: list[int]
    reused_block_count: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    request_id: str
    prompt: Sequence[int]
    grant: Grant


class Admissions:
    """Asks the owner for prompts' blocks. `refused` are requests that never fit, with why.

    `any_stood_back` is set where one asks that stands back, for the caller to look again soon.
    """

    def __init__(
        self,
        calls: BlockCalls,
        held: RequestBlocks,
        namespace: Namespace,
        block_tokens: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refused: dict[str, HarborError] = {}
        self.any_stood_back = False
        self._calls = calls
        self._held = held
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._clock = clock
        self._waiting: _Waiting | None = None
        self._announced: Announced[str] = Announced(held.abandon)
        # When those that stand back are asked for again.
        self._standing_back: dict[str, float] = {}

    def admit(self, request_id: str, prompt: Sequence[int]) -> Admitted | None:
        """Returns the blocks of a prompt, of which at least one token is left to compute; None: not now."""
        self._held.require_epoch()
        acquired: Acquired | None = None
        if self._waiting is not None:
            if self._waiting.request_id == request_id:
                acquired = self._granted(request_id, self._waiting.grant, prompt)
        elif self._clock() < self._standing_back.get(request_id, 0.0):
            self.any_stood_back = True
        else:
            acquired = self._acquire(prompt)
        if acquired is None:
            return None
        self._held.require_epoch(acquired.held, acquired.leased)
        return self._taken(request_id, prompt, acquired)

    def cancel(self, request_id: str | None = None) -> None:
        """Ends the wait of a request, or of any for room; what it was granted meanwhile goes back."""
        if request_id is not None:
            self._standing_back.pop(request_id, None)
        if self._waiting is None or request_id not in (None, self._waiting.request_id):
            return
        waiting, self._waiting = self._waiting, None
        waiting.grant.cancel()
        granted: Acquired | None = None
        with contextlib.suppress(HarborError):  # it has ended the wait, and nothing is held
            granted = waiting.grant.poll()
        if granted is not None and granted.refusal is None:
            self._held.give_back(granted.held, granted.leased)
        # It may have been granted without having come here yet.
        self._announced.add(waiting.request_id, self._chain(waiting.prompt))
        self.ended(waiting.request_id, 0)

    def ended(self, request_id: str, published_block_count: int) -> None:
        """Takes in that an admitted request has ended, or begins again, with so much of it published."""
        chain = self._announced.chains.get(request_id)
        if chain is not None:
            is_complete = published_block_count * self._block_tokens >= len(cast("Sequence[int]", chain.tokens))
            self._announced.end(request_id, is_complete=is_complete)
            self._announced.tell()

    def forget(self) -> None:
        """Takes in that the epoch has ended: nobody waits any more."""
        self._waiting = None
        self._announced.forget()
        self._standing_back.clear()

    def _acquire(self, prompt: Sequence[int]) -> Acquired:
        table_block_count = -(-len(prompt) // self._block_tokens)
        chain = replace(self._chain(prompt), table_block_count=table_block_count, computes=True, unless_pending=True)
        try:
            (acquired,) = self._calls.acquire([chain], wait_s=WAIT_S)
        except Unavailable:  # it is the next process that knows, or a later step
            return _NOT_NOW
        except CallerMistake as mistake:  # such as a token that is none
            return Acquired(refusal=mistake)
        return acquired

    def _granted(self, request_id: str, grant: Grant, prompt: Sequence[int]) -> Acquired | None:
        try:
            granted = grant.poll()
            if granted is not None and granted.refusal is None and not granted.stands_back:
                self._announced.add(request_id, self._chain(prompt))
                granted = self._confirmed(prompt, granted)
        except Unavailable:
            granted = _NOT_NOW
        if granted is not None:
            self._waiting = None
        return granted

    def _confirmed(self, prompt: Sequence[int], granted: Acquired) -> Acquired:
        """Holds again what was granted while the engine went on [E13].

        Of a session a block is held or not. So when the grant came and a request here let go of the same block just
        then, not knowing, that has ended the grant's hold as well. After this no such release is under way. It only
        asks, as the request has been counted.
        """
        try:
            (held,) = self._calls.acquire([self._chain(prompt)])
        except Unavailable:
            self._held.give_back(granted.held, granted.leased)
            return _NOT_NOW
        needed = len(granted.held) + len(granted.leased) - len(held.held)
        if needed > len(granted.leased):
            self._held.give_back(held.held, granted.leased)
            return _NOT_NOW
        self._held.give_back(_NOTHING, granted.leased[needed:])
        return replace(granted, held=held.held, leased=granted.leased[:needed])

    def _chain(self, prompt: Sequence[int]) -> Chain:
        whole = (len(prompt) - 1) // self._block_tokens * self._block_tokens
        return Chain(tokens=prompt[:whole], namespace=self._namespace)

    def _taken(self, request_id: str, prompt: Sequence[int], acquired: Acquired) -> Admitted | None:
        if acquired.stands_back:
            # All together as often as one alone: each time is a round trip, for which the whole step waits.
            pause_s = STAND_BACK_S * max(1, len(self._standing_back))
            self._standing_back[request_id] = self._clock() + min(pause_s, MOST_PAUSE_S)
            self.any_stood_back = True
            return None
        self._standing_back.pop(request_id, None)
        if acquired.grant is not None:
            # Whoever waits holds nothing, the spare blocks neither: they may be what is missing.
            self._waiting = _Waiting(request_id, prompt, acquired.grant)
            self._held.give_back_spare()
            return None
        if acquired.refusal is not None:
            self.ended(request_id, 0)  # if it was granted: that was not confirmed
            if not isinstance(acquired.refusal, PoolExhausted):
                self.refused[request_id] = acquired.refusal
            return None
        self._announced.add(request_id, self._chain(prompt))
        return Admitted(self._held.adopt(acquired.held, acquired.leased), len(acquired.held))
