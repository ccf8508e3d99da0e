"""The worker's half: copies what the scheduler's has planned, and reports what became of it."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvharbor.client import Harbor, HarborError, connect
from kvharbor.engines.vllm.layout import layout_for
from kvharbor.engines.vllm.settings import Settings
from kvharbor.engines.vllm_connector import engine as engines
from kvharbor.engines.vllm_connector.engine import Engine
from kvharbor.engines.vllm_connector.identity import checkpoint_identity
from kvharbor.engines.vllm_connector.messages import Plan, Report
from kvharbor.engines.vllm_connector.pages import Pages
from kvharbor.gpumem import Layout

_LOG = logging.getLogger(__name__)


class WorkerHalf:
    """Opens the pool in the layout of vLLM's own cache, and copies."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self._layer_names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        self._engine = Engine.opening(settings, _layout(vllm_config, kv_cache_config, settings))
        self._joined: Harbor | None = None
        self._join_token = self._engine.harbor.join_token
        self._pages: Pages | None = None
        self._failed: set[int] = set()
        self._stored: dict[int, bool] = {}
        engines.offer(vllm_config, self._engine)

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """Takes in vLLM's cache."""
        self._pages = Pages(self._engine.pool, caches, self._layer_names)

    def load(self, plan: Plan) -> None:
        """Copies what the step reads; what cannot be copied is reported, for vLLM to compute it."""
        if plan.loads and not self._copied(plan, load=True):
            self._failed.update(own for _, own in plan.loads)

    def store(self, plan: Plan) -> None:
        """Copies what the step has filled."""
        if plan.loads or plan.stores:
            self._stored[plan.number] = not plan.stores or self._copied(plan, load=False)

    def take_failed(self) -> set[int]:
        """Returns vLLM's blocks that hold nothing of what they should."""
        failed, self._failed = self._failed, set()
        return failed

    def take_report(self) -> Report | None:
        """Returns what became of plans since the last one."""
        stored, self._stored = self._stored, {}
        return Report(stored) if stored else None

    def shutdown(self) -> None:
        """Lets go of the memory, and ends the sessions."""
        self._pages = None
        if self._joined is not None:
            self._joined.close()
        self._engine.close()

    def _copied(self, plan: Plan, *, load: bool) -> bool:
        try:
            self._enter(plan.join_token)
        except HarborError as refused:
            _LOG.warning("blocks are not copied, as this process is no member of the scheduler's session: %s", refused)
            return False
        with self._engine.gate.step():
            if not plan.life or plan.life != self._engine.life or self._pages is None:
                return False
            try:
                if load:
                    self._pages.load(plan.loads)
                else:
                    self._pages.store(plan.stores)
            except RuntimeError:
                _LOG.exception("blocks could not be copied")
                return False
        return True

    def _enter(self, join_token: str) -> None:
        """Becomes a member of the scheduler's session: once, and again when that is another one in a new epoch."""
        if join_token == self._join_token or join_token == self._engine.harbor.join_token:
            return
        if self._joined is not None:
            self._joined.close()
        settings = self._engine.settings
        self._joined = connect(
            settings.endpoint or None,
            client_name=self._engine.name,
            timeout_s=settings.timeout_s,
            join=join_token,
            rank=1,
        )
        self._join_token = join_token


def _layout(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Layout:
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    specs = {name: group.kv_cache_spec for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    backends = {name: layers[name].get_attn_backend() for name in specs}
    return layout_for(vllm_config, specs, backends, checkpoint_identity(vllm_config.model_config, settings.model))
