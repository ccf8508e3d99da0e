"""The steps of the engine: what is checked before each, and what follows the end of an epoch."""

import time
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

from kvharbor.engines.transformers_cb.admissions import STAND_BACK_S
from kvharbor.engines.transformers_cb.cache import PooledCache
from kvharbor.engines.transformers_cb.scheduler import GivingWay


class PooledProcessor(ContinuousBatchProcessor):
    """transformers' batch processor on a PooledCache. `look_soon` has the engine's loop look again at once."""

    cache: PooledCache
    scheduler: GivingWay
    look_soon: Callable[[], object]

    def prepare_next_batch(self) -> bool:
        """Prepares a step; returns False when there is nothing to compute, and then keeps no block in vain."""
        admissions = self.cache.admissions
        admissions.any_stood_back = False
        ready: bool = super().prepare_next_batch()
        self._fail_refused()
        if not ready:
            self.cache.held.give_back_spare()
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

    def _fail_refused(self) -> None:
        """Fails requests that never fit. They wait, and hold nothing."""
        refused: dict[str, Any] = self.cache.admissions.refused
        while refused:
            request_id, error = refused.popitem()
            state = self.scheduler.waiting_requests.pop(request_id, None)
            if state is not None:
                self.scheduler.waiting_requests_order.remove(request_id)
                self._handle_request_error(error, state)
