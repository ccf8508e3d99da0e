"""transformers' schedulers, where the room that is missing may be another engine's."""

from collections import deque

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler, PrefillFirstScheduler, Scheduler

from kvharbor.engines.transformers_cb.errors import RequestUnderWay

Batch = tuple[list[FutureRequestState] | None, bool, int, int]


class GivingWay(Scheduler):
    """Waits where transformers would end: its own cache can only be full of its own requests, a pool's need not.

    While two or more requests run, those that cannot grow give way to the others, as in transformers. The last one
    gives way to other engines: it lets go of its blocks, which are cached, and is admitted anew [E15].
    """

    def add_waiting_request(self, state: RequestState) -> None:
        """Takes in a request. Raises RequestUnderWay, which fails it, while there is another of its name."""
        if state.request_id in self.active_requests or state.request_id in self.waiting_requests:
            # They would share a table, and write over blocks of it that are published.
            raise RequestUnderWay(state.request_id)
        super().add_waiting_request(state)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Batch:
        """Schedules a step; without any request in it when all have to wait for others."""
        if not self.active_requests:
            self.block_new_requests = False  # nobody runs whose end would let others in
        batch: Batch = super().schedule_batch(token_budget, cache_budget)  # type: ignore[safe-super]
        if batch[0] is not None or len(self.active_requests) > 1:
            return batch
        for state, _ in self.starved_requests:
            self.begin_again(state)
        return [], batch[1], 0, 0

    def begin_all_again(self) -> None:
        """Puts all running requests back among the waiting, also in the middle of the scheduling of a step."""
        self._requests_to_fork.clear()  # what was to run before a fork has not run
        waiting = self.waiting_requests.keys() - self.active_requests.keys()
        self.waiting_requests_order = deque(
            request_id for request_id in dict.fromkeys(self.waiting_requests_order) if request_id in waiting
        )
        for state in [*self.active_requests.values()]:
            self.begin_again(state)

    def begin_again(self, state: RequestState) -> None:
        """Puts a running request back among the waiting, with the tokens that it has."""
        waiting = state.create_equivalent_initial_request()
        # Not by the property, which would note the end of its life.
        state._status = RequestStatus.FINISHED
        self.finish_request(state.request_id)
        super().add_waiting_request(waiting)


class PooledFIFOScheduler(GivingWay, FIFOScheduler):
    """First come, first served."""


class PooledPrefillFirstScheduler(GivingWay, PrefillFirstScheduler):
    """Prompts that were cut go first."""


SCHEDULERS: dict[str, type[GivingWay]] = {
    "fifo": PooledFIFOScheduler,
    "prefill_first": PooledPrefillFirstScheduler,
}
