"""The manager: what a user has in the place of transformers' own."""

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation

from kvharbor.client import EpochEnded, HarborError, Namespace, Pool
from kvharbor.engines.step_gate import StepGate
from kvharbor.engines.transformers_cb import support
from kvharbor.engines.transformers_cb.cache import PooledCache, Reuse
from kvharbor.engines.transformers_cb.errors import PoolTaken
from kvharbor.engines.transformers_cb.processor import PooledProcessor
from kvharbor.engines.transformers_cb.scheduler import SCHEDULERS

_taken: "weakref.WeakSet[Pool]" = weakref.WeakSet()
NO_NAMESPACE = Namespace()


class PooledManager(ContinuousBatchingManager):
    """transformers' manager of continuous batching, with its cache in a pool that other engines share.

    All else is as there: `start`, `add_request`, `get_result`, `stop`. A stop that finishes what was asked waits for
    other engines for STOP_WAIT_S at most. `reuse` counts what was not computed. While it runs it is the only manager of
    its pool in this session. It goes on in a new epoch if the harbor's `on_epoch` calls the manager's: requests then
    begin again with the tokens that they have.

    Raises LayoutMismatch when the pool is another model's, BatchingUnsupported, naming what is not supported.
    """

    def __init__(
        self,
        model: Any,
        pool: Pool,
        generation_config: Any = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        *,
        namespace: Namespace = NO_NAMESPACE,
        workload_hints: Any = None,
    ) -> None:
        support.require_version()
        support.require_pool(model, pool)
        own = model.generation_config if generation_config is None else generation_config
        asked = ContinuousBatchingConfig() if continuous_batching_config is None else continuous_batching_config
        settings = support.settings_over(pool, copy.deepcopy(asked))
        super().__init__(model, support.with_stop_token(own), settings, workload_hints)
        support.require_resolved(self.continuous_batching_config, self.distributed_helper)
        self.reuse = Reuse()
        self._pool = pool
        self._namespace = namespace
        self._gate = StepGate()
        # As long as the thread runs, while a `stop` that does not wait for that has forgotten `batch_processor`.
        self._processor: PooledProcessor | None = None

    batch_processor: PooledProcessor | None

    def on_epoch(self, old_epoch: str, new_epoch: str) -> None:
        """Returns when the engine touches the pool's memory no more; what is under way then begins again."""
        del old_epoch, new_epoch
        processor = self._processor or self.batch_processor
        if processor is not None:
            processor.cache.held.epoch_ended = True
        self._gate.wait_for_end()

    def start(self) -> None:
        """Starts the engine's thread. Raises PoolTaken while another manager of this session works on the pool."""
        if not self.is_running():
            if self._pool in _taken:
                raise PoolTaken(self._pool.name)
            _taken.add(self._pool)
        super().start()

    def _run_generation_loop(self, use_inference_mode: bool) -> None:
        try:
            super()._run_generation_loop(use_inference_mode)
        finally:
            processor, self._processor = self._processor, None
            self._pool.blocks.on_recall = None
            # Whatever keeps it from giving back, the end of the session does so.
            with contextlib.suppress(HarborError):
                if processor is not None:
                    processor.cache.give_back()
            _taken.discard(self._pool)

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        try:
            if batch_processor.cache.held.epoch_ended:
                batch_processor.begin_again()
            going_on: bool = super()._generation_loop_body(batch_processor, bootstrapping)
            return going_on
        except EpochEnded:
            if self._pool.link.options.on_epoch is None:
                raise
            batch_processor.begin_again()
            return True

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """As the base class does, with classes of our own for cache, scheduler and processor."""
        processor = self.batch_processor
        if processor is not None:
            processor.reset()
        else:
            processor = self._pooled_processor()
        self._processor = processor
        self._pool.blocks.on_recall = processor.cache.held.recall
        return processor

    def _pooled_processor(self) -> PooledProcessor:
        settings = self.continuous_batching_config
        supports_logits_to_keep = getattr(self.model, "_supports_logits_to_keep", None)
        cache = PooledCache(
            self._pool,
            self._namespace,
            self._gate,
            self.reuse,
            config=self.model.config.get_text_config(),
            continuous_batching_config=settings,
            device=self.model.device,
            distributed_helper=self.distributed_helper,
            dtype=self.model.dtype,
            model_supports_logits_to_keep=callable(supports_logits_to_keep) and supports_logits_to_keep(),
        )
        self._use_prefix_sharing = True
        update_cb_config_after_cache_creation(
            cb_config=settings, num_blocks=cache.num_blocks, max_batch_tokens=cache.max_batch_tokens
        )
        scheduler = SCHEDULERS[settings.scheduler_type](
            cache=cache,
            safety_margin=cast("float", settings.safety_margin),  # None: the class's own
            max_requests_per_batch=cast("int", settings.max_requests_per_batch),  # resolved above
        )
        processor = PooledProcessor(
            cache=cache,
            config=self.model.config.get_text_config(),
            generation_config=self.generation_config,
            continuous_batching_config=settings,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )
        processor.look_soon = self._wake_up_loop.set
        return processor


@contextlib.contextmanager
@torch.no_grad()
def continuous_batching(model: Any, pool: Pool, *arguments: Any, **keywords: Any) -> Iterator[PooledManager]:
    """Runs a manager while the context lasts; arguments are those of PooledManager."""
    manager = PooledManager(model, pool, *arguments, **keywords)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True)
        manager.destroy()
