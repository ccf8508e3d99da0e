"""The steps of the engine: what is checked before each, and what follows the end of an epoch."""

import time
from collections.abc import Callable
from math import inf
from typing import Any

from torch import nn
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, ContinuousBatchProcessor

from kvharbor.engines.transformers_cb.admissions import STAND_BACK_S
from kvharbor.engines.transformers_cb.cache import PooledCache
from kvharbor.engines.transformers_cb.errors import StoppedWaiting
from kvharbor.engines.transformers_cb.scheduler import GivingWay

STOP_WAIT_S = 10.0
"""How long an engine that is to stop waits for others: each end of a process has a time in which it is expected."""


class PooledProcessor(ContinuousBatchProcessor):
    """transformers' batch processor on a PooledCache. `look_soon` has the engine's loop look again at once."""

    cache: PooledCache
    scheduler: GivingWay
    look_soon: Callable[[], object]
    clock: Callable[[], float] = staticmethod(time.monotonic)
    _gives_up_at_s = inf

    def reset(self) -> None:
        """Begins anew, for another session of the manager."""
        super().reset()
        self._gives_up_at_s = inf

    def prepare_next_batch(self) -> bool:
        """Prepares a step; returns False when there is nothing to compute, and then keeps no block in vain."""
        admissions = self.cache.admissions
        admissions.any_stood_back = False
        ready: bool = super().prepare_next_batch()
        self._fail_refused()
        if ready:
            self._gives_up_at_s = inf
        else:
            self.cache.held.give_back_spare()
            self._give_up()
            if admissions.any_stood_back:
                # The loop would wait ten times as long for something new.
                time.sleep(STAND_BACK_S)
                self.look_soon()
        return ready

    def _generation_step(self, model: nn.Module) -> None:
        with self.cache.gate.step(), self.cache.computing:
            self.cache.held.require_epoch()
            super()._generation_step(model)

    def begin_again(self) -> None:
        """Starts over, in a new epoch, with the tokens that each request has."""
        self.cache.forget()
        self.scheduler.begin_all_again()

    def _give_up(self) -> None:
        """Fails what only waits for other engines, once this one was to stop some time ago.

        transformers finishes all that was asked of it first: of its own cache there is room again at some time.
        """
        if self.background_thread_status.tp_status != BackgroundThreadStatus.FLUSH_AND_STOP:
            return
        now_s = self.clock()
        self._gives_up_at_s = min(self._gives_up_at_s, now_s + STOP_WAIT_S)
        if now_s >= self._gives_up_at_s:
            for request_id in self.scheduler.waiting_requests:
                self.cache.free_blocks(request_id)
            self.fail_all_requests(StoppedWaiting(STOP_WAIT_S))

    def _fail_refused(self) -> None:
        """Fails requests that never fit. They wait, and hold nothing."""
        refused: dict[str, Any] = self.cache.admissions.refused
        while refused:
            request_id, error = refused.popitem()
            state = self.scheduler.waiting_requests.pop(request_id, None)
            if state is not None:
                self.scheduler.waiting_requests_order.remove(request_id)
                self._handle_request_error(error, state)
