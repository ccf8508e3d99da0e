"""The scheduler's half: vLLM's own scheduler, with the service's blocks under it.

A step is `schedule` (ask for those who wait, then vLLM's own scheduling, which only sees what is held) and
`update_from_output` (the step has run: publish what it has filled, then vLLM's own update, then tell the service what
is not needed any more). A decode step makes no call but where a block fills up and the store of leased ones is empty;
where none does it is little more than vLLM's own step.
"""

import dataclasses
import logging
import secrets
import time
from typing import Any, Self

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from kvharbor.client import Credits, Namespace, NoOrder, Unavailable
from kvharbor.engines.vllm.admission import Admission
from kvharbor.engines.vllm.blocks import HarborBlockPool
from kvharbor.engines.vllm.errors import ContractBroken, FeatureUnsupported, needs_pool
from kvharbor.engines.vllm.layout import known_part, require_known_part
from kvharbor.engines.vllm.owner import BlockCalls, Store
from kvharbor.engines.vllm.publication import Publication
from kvharbor.engines.vllm.room import Room
from kvharbor.engines.vllm.session import STAMP, Attachment, Stamp, connected, handover, pool_info
from kvharbor.engines.vllm.settings import Settings
from kvharbor.engines.vllm.support import require_fit, require_supported, require_worker

STORE_IDLE_S = 60.0
IDLE_S = 0.002
"""Between two steps where nothing runs and somebody waits: vLLM asks again at once."""

_LOG = logging.getLogger(__name__)


class HarborSchedulerMixin:
    """In front of one of vLLM's schedulers: its block pool's contents and room come from the service."""

    requests: dict[str, Request]
    running: list[Request]
    waiting: Any
    kv_holding_waiting: Any
    num_waiting_for_streaming_input: int
    _inflight_prefills: set[Request]
    kv_cache_manager: Any
    kv_cache_config: Any
    vllm_config: Any
    defer_block_free: bool

    def __init__(self, vllm_config: Any, *arguments: Any, **keywords: Any) -> None:
        settings = require_supported(vllm_config)
        super().__init__(vllm_config, *arguments, **keywords)  # type: ignore[call-arg]
        self._require_fit()
        self._taking_in = False
        # [E23] Also where steps do not overlap: an abort may come between a step's scheduling and its end.
        self.defer_block_free = True
        self.kv_cache_manager.watermark_blocks = 0
        self._stamp, self._attachment, calls = self._open(settings)
        calls.on_refusal = lambda refused: _LOG.error("the service has refused what was not awaited: %s", refused)
        self._calls = calls
        self._pool = self._replace_pool()
        namespace = Namespace(scheme=_scheme(vllm_config))
        self._publication = Publication(self._pool, calls, namespace)
        self._admission = Admission(
            self._pool,
            calls,
            namespace,
            self._flush,
            self._publication.announce,
            max_model_len=vllm_config.model_config.max_model_len,
        )
        self._room = Room(self._pool, calls, self._flush, self._make_store)
        self._pool.when_empty = self._room.when_empty
        self._pool.when_reset = self._outdate
        self._pool.available_elsewhere = lambda: calls.status.available_block_count

    # What vLLM calls

    @needs_pool
    def schedule(self, *arguments: Any, **keywords: Any) -> Any:
        """Schedules a step with what is held, after asking for those who wait."""
        pool, is_calm = self._pool, self._is_calm()
        free_count = pool.free_block_queue.num_free_blocks
        if not is_calm:
            self._room.begin_step(len(self.running))
            self._admission.prepare(self)
            self._make_room()
        output = super().schedule(*arguments, **keywords)  # type: ignore[misc]
        setattr(output, STAMP, self._stamp)
        self._publication.scheduled(output)
        if is_calm and not pool.released and pool.free_block_queue.num_free_blocks == free_count:
            return output
        self._admission.admitted(output.num_scheduled_tokens)
        self._look_after_prompts()
        self._room.begin_step(len(self.running))
        self._room.trim(self._owed())
        self._flush()
        if not output.num_scheduled_tokens and not self.running and (self.waiting or self.kv_holding_waiting):
            time.sleep(IDLE_S)
        return output

    @needs_pool
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Publishes what the step has filled, and takes in what it has computed."""
        self._publication.has_run(scheduler_output)
        self._taking_in = True
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        finally:
            self._taking_in = False
        if self._pool.filled:
            self._publication.written()
        if not self.running or self._pool.released:
            self._give_back_idle()
        return outputs

    @needs_pool
    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        """Ends requests from outside, and what is held for those that wait."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in finished:
            self._admission.forget(request.request_id)
        self._look_after_prompts()
        if not self._taking_in:  # else what it has written is published before anything is released
            self._give_back_idle()
        return finished

    @needs_pool
    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pauses or goes on. A pause has no end of its own: what is held for those who wait goes back first."""
        super().set_pause_state(pause_state)  # type: ignore[misc]
        if pause_state is not PauseState.UNPAUSED:
            self._admission.forget_all()
            self._look_after_prompts()
            self._room.begin_step(0)
            self._room.trim(0)
            self._flush()

    def shutdown(self) -> None:
        """Ends the session; vLLM has ended the workers before."""
        super().shutdown()  # type: ignore[misc]
        if self._attachment is not None:
            self._attachment.close()

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        return ready and self._admission.may_enter(request)

    # Inside

    def _is_calm(self) -> bool:
        """Whether nobody waits and nothing is on its way, so that only what runs can change what is held.

        A session between two inputs waits for its user.
        """
        return not (
            self.waiting
            or self._inflight_prefills
            or len(self.kv_holding_waiting) > self.num_waiting_for_streaming_input
            or self._admission.is_busy
        ) and self._room.is_settled(len(self.running))

    def _make_room(self) -> None:
        """Has free blocks for the prompts that are on their way, and gives up newcomers where there are too few."""
        while not self._room.require(self._owed(), growth=not self._admission.lacking):
            if not self._admission.give_way():
                return
            self._flush()

    def _owed(self) -> int:
        """Free blocks that admitted prompts still need, those that may enter, and sessions whose input goes on."""
        owed = self._admission.lacking
        tables = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        for request in [*self._inflight_prefills, *self.kv_holding_waiting]:
            if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING):
                block_count = -(-request.num_tokens // self._pool.hash_block_size)
                owed += max(0, block_count - len(tables.get(request.request_id, ())))
        return owed

    def _give_back_idle(self) -> None:
        if not self.running and not self._admission.lacking:
            self._room.begin_step(0)
            self._room.trim(0)
        self._flush()

    def _look_after_prompts(self) -> None:
        self._publication.look(self.requests, self._admission.may_enter)

    def _flush(self) -> None:
        if self._pool.released:
            released = self._pool.take_released()
            self._admission.note_released(released)
            self._calls.release(released)

    def _outdate(self) -> None:
        """Goes on with a version of its own [E26], which it names itself: nothing of before is a hit from now on."""
        self._admission.forget_all()
        self._publication.forget()
        # All that are here: between two inputs of a session its blocks are kept by a request that does not run.
        self._pool.outdate(self.requests)
        self._flush()
        namespace = dataclasses.replace(self._admission.namespace, version=secrets.token_hex(16))
        self._admission.namespace = self._publication.namespace = namespace
        try:
            self._calls.bump_namespace(namespace.version)
        except Unavailable as away:
            # It only keeps the old version's blocks from being freed before others are.
            _LOG.warning("the service does not know yet that the prefix cache was reset: %s", away)

    # At the start

    def _require_fit(self) -> None:
        groups = self.kv_cache_config.kv_cache_groups
        if len(groups) != 1 or self.kv_cache_config.needs_kv_cache_zeroing:
            raise FeatureUnsupported("hybrid KV caches", f"{len(groups)} groups", "use a model of full attention only")
        pool, block_tokens = self.kv_cache_manager.block_pool, groups[0].kv_cache_spec.block_size
        if pool.hash_block_size != block_tokens:
            raise FeatureUnsupported(
                "hits of parts of blocks", f"of {pool.hash_block_size} tokens", "unset prefix_match_unit"
            )
        require_fit(self.vllm_config, pool.num_gpu_blocks, block_tokens)

    def _open(self, settings: Settings) -> tuple[Stamp, Attachment | None, BlockCalls]:
        """Returns the session to speak for, with the block calls of its pool."""
        from kvharbor.engines.vllm.worker import HarborWorkerMixin

        require_worker(self.vllm_config, HarborWorkerMixin)
        attachment = handover.take(self.vllm_config.instance_id) or self._connect(settings)
        # A step's results are here when it is published: nothing is left to wait for on a device.
        attachment.pool.order = NoOrder()
        return attachment.stamp, attachment, attachment.pool.blocks

    def _connect(self, settings: Settings) -> Attachment:
        """Opens the pool that the workers have opened before, from another process than theirs."""
        harbor = connected(settings, "scheduler")
        try:
            info = pool_info(harbor, settings.pool)
            if info is None or info.layout is None:
                raise ContractBroken(f"the pool {settings.pool} that the workers have opened is not there")
            require_known_part(info.layout, known_part(self.vllm_config, self.kv_cache_config))
            if info.block_count != self.kv_cache_config.num_blocks:
                raise ContractBroken(f"vLLM has {self.kv_cache_config.num_blocks} blocks, the pool {info.block_count}")
            return Attachment(harbor, harbor.open_pool(settings.pool, info.layout))
        except BaseException:
            harbor.close()
            raise

    def _make_store(self) -> Store | None:
        if self._attachment is None:
            return None
        # It is given back here when nothing runs, and otherwise when others need room.
        return Credits(self._attachment.pool, 1, idle_s=STORE_IDLE_S)

    def _replace_pool(self) -> HarborBlockPool:
        """Puts the shared pool in the place of vLLM's own, which nobody has used yet."""
        manager, coordinator = self.kv_cache_manager, self.kv_cache_manager.coordinator
        pool = HarborBlockPool(manager.block_pool)
        manager.block_pool = coordinator.block_pool = pool
        for each in coordinator.single_type_managers:
            each.block_pool, each._null_block = pool, pool.null_block
        return pool


class HarborScheduler(HarborSchedulerMixin, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler on a pool. Where the engine schedules asynchronously, it is a HarborAsyncScheduler."""

    def __new__(cls, vllm_config: Any, *_: Any, **__: Any) -> Self:
        if vllm_config.scheduler_config.async_scheduling and not issubclass(cls, AsyncScheduler):
            cls = HarborAsyncScheduler
        made: Self = super().__new__(cls)
        return made


class HarborAsyncScheduler(HarborScheduler, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler on a pool."""


def _scheme(vllm_config: Any) -> str:
    """Returns how this engine's keys come about: engines with other hashes or seeds would never agree on one."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    return f"vllm/{algorithm}/{resolve_none_hash_seed(get_hash_fn_by_name(algorithm))}"
