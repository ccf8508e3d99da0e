"""The connector: vLLM's interface, its calls passed on to the half that runs here."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvharbor.engines.vllm.versions import require_tested, vllm_version
from kvharbor.engines.vllm_connector import engine
from kvharbor.engines.vllm_connector.messages import Plan, Report
from kvharbor.engines.vllm_connector.scheduler_half import Limits, SchedulerHalf
from kvharbor.engines.vllm_connector.settings import settings_of
from kvharbor.engines.vllm_connector.support import require_supported
from kvharbor.engines.vllm_connector.worker_half import WorkerHalf

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks


class HarborConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Copies prefixes between vLLM's own KV cache and a pool that other engines share.

    Raises what is not supported by name (FeatureUnsupported), and LayoutMismatch with every field in which the pool
    differs from what the engine needs.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = settings_of(vllm_config)
        require_tested(vllm_version(), allow_untested=settings.allow_untested_version)
        require_supported(vllm_config)
        self._worker: WorkerHalf | None = None
        self._scheduler: SchedulerHalf | None = None
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, settings)
        else:
            transfer, limits = vllm_config.kv_transfer_config, vllm_config.scheduler_config
            self._scheduler = SchedulerHalf(
                engine.take(vllm_config, kv_cache_config, settings),
                _scheme(vllm_config),
                vllm_config.cache_config.block_size,
                Limits(limits.max_num_seqs, limits.max_num_batched_tokens),
                loads=transfer.is_kv_consumer,
                stores=transfer.is_kv_producer,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not stored is computed again."""
        return False

    # Of the worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Takes in vLLM's cache."""
        self._worker_half.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Copies what the step reads of the pool."""
        del forward_context
        self._worker_half.load(self._bound_plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is left to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Nothing: whole blocks are copied after the step."""

    def wait_for_save(self) -> None:
        """Copies what the step has filled to the pool."""
        self._worker_half.store(self._bound_plan)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns vLLM's blocks that have to be computed after all."""
        return self._worker_half.take_failed()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Reports what became of the step's plan."""
        return self._worker_half.take_report()

    # Of the scheduler

    def on_new_request(self, request: Any) -> None:
        """Takes in that a request waits."""
        self._scheduler_half.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens the pool has behind vLLM's own."""
        return self._scheduler_half.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Takes in which of vLLM's blocks a request has."""
        self._scheduler_half.admitted(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Returns the plan of a step."""
        state = scheduler_output.kv_connector_block_state
        return self._scheduler_half.plan(scheduler_output.num_scheduled_tokens, state.get_block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        """Publishes what was stored."""
        report = connector_output.kv_connector_worker_meta
        self._scheduler_half.reported(report if isinstance(report, Report) else None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Lets vLLM free the blocks at once."""
        del block_ids
        self._scheduler_half.end(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished: there is one group."""
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        """Finds nothing any more of what was stored so far."""
        self._scheduler_half.reset()
        return True

    def shutdown(self) -> None:
        """Ends what this half has with the service."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.close()

    @property
    def _worker_half(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker

    @property
    def _scheduler_half(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _bound_plan(self) -> Plan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, Plan)
        return plan


def _scheme(vllm_config: Any) -> str:
    """Returns how this engine's keys come about: as that of engines in place, with whom it may share."""
    return f"vllm/{vllm_config.cache_config.prefix_caching_hash_algo}/{get_none_hash_seed()}"
