"""Requests that wait: each enters with all of its blocks, or holds none [E11].

For a request that could be admitted now the service is asked once: for what is there of its prompt, which is held from
then on, and for room for all the rest, or nothing. Where there is none the request waits for it in the service's queue,
with those of other engines, and keeps nothing meanwhile, so that no two engines wait for each other. Where another is
computing what comes next of its prompt it stands back [W8]: it keeps nothing either, and is asked for again soon after.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from kvharbor.client import Acquired, BlockRun, Chain, Grant, HarborError, Namespace, RequestTooLarge, Unavailable
from kvharbor.engines.vllm.blocks import HarborBlockPool
from kvharbor.engines.vllm.candidates import Candidate, Distinct, is_ready, of_one_call, place_count
from kvharbor.engines.vllm.owner import BlockCalls
from kvharbor.engines.vllm.postponed import Postponed

WAIT_S = 30.0
"""How long a request stands in the service's queue before it is put there anew."""
ROUNDS = 4
"""A prompt that is there already costs a step little, so that more requests fit in than it seemed at first."""
STAND_BACK_S = 0.01
"""Before a request is asked for again that another engine is computing."""
AWAY_S = 0.05
TOO_LARGE_S = 1.0
"""Before it is asked again, where the service is away, or a request is larger than what the pool can ever give."""

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Reservation:
    """What is held for a request that has not been admitted yet: hits, and `lacking` free blocks for the rest."""

    pins: list[KVCacheBlock]
    lacking: int
    cached_count: int


@dataclass(slots=True, eq=False)
class _Wait:
    """A request in the service's queue, and what was released since it stands there."""

    candidate: Candidate
    grant: Grant
    released: set[tuple[int, int]] = field(default_factory=set)


class Admission:
    """Holds blocks for waiting requests, of one scheduler. `flush` sends what is to be released.

    `announce` takes in whose prompts others were told of that they are computed here.
    """

    def __init__(
        self,
        pool: HarborBlockPool,
        calls: BlockCalls,
        namespace: Namespace,
        flush: Callable[[], None],
        announce: Callable[[Candidate], None],
        *,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._calls = calls
        self.namespace = namespace
        self._flush = flush
        self._announce = announce
        self._block_tokens: int = pool.hash_block_size
        self._max_model_len = max_model_len
        self._clock = clock
        self._reserved: dict[str, _Reservation] = {}
        self._waits: dict[str, _Wait] = {}
        self._postponed = Postponed(clock)
        self._away_until_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether something is held, waited for or looked at again, for somebody."""
        return bool(self._reserved or self._waits or self._postponed)

    @property
    def lacking(self) -> int:
        """Free blocks that those need who may enter."""
        return sum(each.lacking for each in self._reserved.values()) if self._reserved else 0

    def may_enter(self, request: Request) -> bool:
        """Whether a waiting request has all of its blocks; those that have some already need no more at once."""
        return request.request_id in self._reserved or request.num_computed_tokens > 0

    def prepare(self, scheduler: Any) -> None:
        """Asks for what those need who could be admitted in the next step, in the order of vLLM's queue."""
        if self.is_busy:
            for name in {*self._reserved, *self._waits, *self._postponed} - scheduler.requests.keys():
                self.forget(name)
        # Now, so that no hold which a grant brings is ended by a release of before.
        self._flush()
        self._poll()
        if not scheduler.waiting:
            return
        if scheduler.pause_state is not PauseState.UNPAUSED or self._clock() < self._away_until_s:
            return
        if again := self._again(scheduler):
            with self._postponed.asking():
                have_got = self._acquire(again)
            if not have_got:
                return
        for _ in range(ROUNDS):
            batch = of_one_call(self._batch(scheduler))
            if not batch or not self._acquire(batch):
                return

    def admitted(self, scheduled: Any) -> None:
        """Takes in which requests have entered: they have references of their own now."""
        for request_id in [name for name in self._reserved if name in scheduled]:
            self._drop(request_id)

    def forget(self, request_id: str) -> None:
        """A request waits no more."""
        self._drop(request_id)
        self._postponed.discard(request_id)
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            wait.grant.cancel()
            self._settle(wait)

    def forget_all(self) -> None:
        """Holds nothing for anybody any more; who still waits is asked for anew."""
        for request_id in [*self._reserved, *self._waits, *self._postponed]:
            self.forget(request_id)

    def give_way(self) -> bool:
        """Gives up what is held for the last of those who may enter; False if there is nobody."""
        if not self._reserved:
            return False
        self._drop(next(reversed(self._reserved)))
        return True

    def note_released(self, released: BlockRun) -> None:
        """Takes in what was released, which a grant that is on its way may still count as held."""
        for wait in self._waits.values():
            wait.released.update(released)

    # Whom to ask for

    def _again(self, scheduler: Any) -> list[Candidate]:
        """Returns those who are asked for again, first the one for whom that is due the longest.

        They most likely stand back as before, and must not keep those behind them out of the step: they have a call of
        their own. It is for no more than there are places, as each may be given all of its blocks.
        """
        in_front = takewhile(lambda request: request.request_id not in self._waits, scheduler.waiting)
        due = self._postponed.due(filter(is_ready, in_front))
        found = filter(None, map(Distinct(self._pool, self._max_model_len).candidate, due))
        return of_one_call(islice(found, max(0, place_count(scheduler) - len(self._reserved))))

    def _batch(self, scheduler: Any) -> Iterator[Candidate]:
        """Yields those who fit into one step, in order, but for those who are asked for again."""
        tokens = scheduler.max_num_scheduled_tokens - len(scheduler.running)
        places = place_count(scheduler)
        distinct = Distinct(self._pool, self._max_model_len)
        for request in scheduler.waiting:
            if tokens <= 0 or places <= 0:
                return
            name = request.request_id
            if name in self._waits:
                return
            if not is_ready(request) or name in self._postponed:
                continue
            places -= 1
            reservation = self._reserved.get(name)
            if reservation is not None:
                tokens -= request.num_tokens - reservation.cached_count * self._block_tokens
                continue
            candidate = distinct.candidate(request)
            if candidate is not None:
                tokens -= request.num_tokens - self._block_tokens * self._pool.hit_count(candidate.keys)
                yield candidate

    # Asking

    def _acquire(self, batch: list[Candidate]) -> bool:
        """Returns whether all have got what they need."""
        self._flush()
        pinned = [self._pool.pin_hits(candidate.keys) for candidate in batch]
        chains = [self._chain(*pair) for pair in zip(batch, pinned, strict=True)]
        if self._has_no_spare_block(batch):
            # So that the step behind their admission need not ask for it.
            last = chains[-1]
            chains[-1] = dataclasses.replace(last, table_block_count=last.table_block_count + 1)
        try:
            results = self._calls.acquire(chains, wait_s=WAIT_S)
        except Unavailable as away:
            _LOG.warning("requests cannot be admitted, again in %s s: %s", AWAY_S, away)
            self._away_until_s = self._clock() + AWAY_S
            results = [Acquired(refusal=away)] * len(batch)
        for candidate, pins, result in zip(batch, pinned, results, strict=True):
            self._take(candidate, pins, result)
        return all(result.refusal is None for result in results)

    def _has_no_spare_block(self, batch: list[Candidate]) -> bool:
        """Whether one more than all need should be leased: where there is none here, and plenty elsewhere."""
        if self._pool.free_block_queue.num_free_blocks > self.lacking:
            return False
        needed = sum(candidate.block_count for candidate in batch)
        status = self._calls.status
        return status.available_block_count > needed and not status.waiting_count

    def _chain(self, candidate: Candidate, pins: list[KVCacheBlock]) -> Chain:
        # The service does not know yet of blocks whose step is under way; they need no room all the same.
        unknown = sum(not self._pool.is_published(block) for block in pins)
        return Chain(
            keys=b"".join(candidate.keys),
            namespace=self.namespace,
            table_block_count=candidate.block_count - unknown,
            computes=True,
            unless_pending=True,
        )

    def _take(self, candidate: Candidate, pins: list[KVCacheBlock], result: Acquired) -> None:
        name = candidate.request.request_id
        if result.refusal is None and not result.stands_back:
            self._reserve(candidate, pins, result)
            return
        self._pool.free_blocks(reversed(pins))
        if result.grant is not None:
            self._waits[name] = _Wait(candidate, result.grant)
        elif result.stands_back:
            self._postponed.add(name, STAND_BACK_S)
        elif isinstance(result.refusal, RequestTooLarge):
            # What an operator has pinned may go again.
            _LOG.warning("%s cannot be admitted, again in %s s: %s", name, TOO_LARGE_S, result.refusal)
            self._postponed.add(name, TOO_LARGE_S)

    def _reserve(self, candidate: Candidate, pins: list[KVCacheBlock], result: Acquired) -> None:
        self._announce(candidate)
        adopted = self._pool.adopt(result.held, candidate.keys)
        self._pool.lend(result.leased)
        name, hits = candidate.request.request_id, max(len(pins), len(adopted))
        self._postponed.discard(name)
        self._pool.outdated_requests.discard(name)
        self._reserved[name] = _Reservation([*pins, *adopted], candidate.block_count - hits, hits)

    # Waiting

    def _poll(self) -> None:
        for name, wait in [*self._waits.items()]:
            try:
                result = wait.grant.poll()
            except HarborError as ended:
                _LOG.warning("request %s asks for room anew: %s", name, ended)
                del self._waits[name]
                continue
            if result is None:
                continue
            del self._waits[name]
            if result.refusal is None and not wait.released.isdisjoint(result.held):
                # The release has ended a hold that the grant counts on.
                self._return(wait, result)
            else:
                self._take(wait.candidate, self._pool.pin_hits(wait.candidate.keys), result)

    def _settle(self, wait: _Wait) -> None:
        """Gives back what was granted before the wait was cancelled, be that known here or not."""
        self._announce(wait.candidate)
        try:
            result = wait.grant.poll()
        except HarborError:
            return
        if result is not None and result.refusal is None:
            self._return(wait, result)

    def _return(self, wait: _Wait, result: Acquired) -> None:
        self._announce(wait.candidate)
        fresh = BlockRun.of(pair for pair in result.held if pair[0] not in self._pool.held)
        self.note_released(fresh)
        self._calls.release(BlockRun.join([result.leased, fresh]))

    def _drop(self, request_id: str) -> None:
        reservation = self._reserved.pop(request_id, None)
        if reservation is not None:
            self._pool.free_blocks(reversed(reservation.pins))
