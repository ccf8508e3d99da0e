"""The worker's half: vLLM's KV cache in the pool's memory, and no step before this process is a member."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from kvharbor.engines.vllm.identity import common_identity, weights_identity
from kvharbor.engines.vllm.layout import layout_for, only_spec, require_same_places
from kvharbor.engines.vllm.memory import PoolAllocation
from kvharbor.engines.vllm.session import Attachment, Membership, handover
from kvharbor.engines.vllm.support import require_fit, require_scheduler, require_supported
from kvharbor.gpumem import Layout

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class HarborWorkerMixin:
    """In front of one of vLLM's worker classes: maps the pool, and has vLLM make its KV cache there.

    The pool is opened when vLLM asks how much memory there is, as all about it is known then but the number of blocks,
    which is the pool's. The mapping stays for the life of the process: captured graphs hold its addresses.
    """

    vllm_config: Any
    cache_config: Any
    model_runner: Any
    rank: int
    get_kv_cache_spec: Any
    _should_warm_up_model: Any

    def __init__(self, vllm_config: Any, *arguments: Any, **keywords: Any) -> None:
        from kvharbor.engines.vllm.scheduler import HarborSchedulerMixin

        self.harbor_settings = require_supported(vllm_config)
        require_scheduler(vllm_config, HarborSchedulerMixin)
        self._attachment: Attachment | None = None
        self._allocation: PoolAllocation | None = None
        self._membership: Membership | None = None
        super().__init__(vllm_config, *arguments, **keywords)  # type: ignore[call-arg]

    def determine_available_memory(self) -> int:
        """Opens the pool and returns the bytes of its blocks.

        Raises FeatureUnsupported where it is too small: vLLM's own check would advise to give the engine more memory.
        """
        pool = self._attached().pool
        if self.vllm_config.model_config.original_max_model_len != -1:  # else vLLM makes it fit
            require_fit(self.vllm_config, pool.descriptor.block_count, pool.block_tokens)
        size_bytes = pool.descriptor.size_bytes
        self.cache_config.kv_cache_memory_bytes = size_bytes
        if current_platform.is_cpu():
            # vLLM would look for that much free memory, which the service has taken already.
            if self._should_warm_up_model():
                self.model_runner.warming_up_model()
        else:
            super().determine_available_memory()  # type: ignore[misc]
        return size_bytes

    def initialize_from_config(self, kv_cache_config: "KVCacheConfig") -> None:
        """Has vLLM make its KV cache in the pool's memory, and checks that all of it is there, page by page."""
        attachment = self._attached()
        only_spec(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
        require_same_places(kv_cache_config, attachment.pool.descriptor)
        memory = attachment.pool.views.torch_bytes().view(torch.int8)
        self._allocation = PoolAllocation(memory)
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self._allocation.require_answered(self.model_runner.kv_caches)
        self._membership = Membership(self.harbor_settings, attachment, self.rank)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache" and self._allocation is not None:
            return self._allocation
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]
        return context

    def execute_model(self, scheduler_output: Any) -> Any:
        """Runs a step, as a member of the session that holds its blocks."""
        if self._membership is not None:
            self._membership.require(scheduler_output)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def shutdown(self) -> None:
        """Leaves the session. The mapping stays until the process ends."""
        super().shutdown()  # type: ignore[misc]
        if self._membership is not None:
            self._membership.close()

    def _attached(self) -> Attachment:
        if self._attachment is None:
            part = self.vllm_config.parallel_config.rank
            self._attachment = Attachment.open(self.harbor_settings, self._layout(), role="worker", part=part)
            handover.offer(self.vllm_config.instance_id, self._attachment)
        return self._attachment

    def _layout(self) -> Layout:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        backends = {name: layer.get_attn_backend() for name, layer in layers.items()}
        return layout_for(self.vllm_config, self.get_kv_cache_spec(), backends, self._identity())

    def _identity(self) -> str:
        if self.harbor_settings.model:
            return self.harbor_settings.model
        own = weights_identity(self.model_runner.get_model(), self.vllm_config.model_config.hf_config)
        return common_identity(own, _of_all_ranks(own))


def _of_all_ranks(own: str) -> list[str]:
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return [own]
    gathered: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(gathered, own, group=group.cpu_group)
    return gathered


class HarborWorker(HarborWorkerMixin, PlatformWorker):  # type: ignore[misc]
    """vLLM's worker of this platform, CPU or GPU, on a pool."""
