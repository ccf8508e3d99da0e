"""vLLM engines that share one pool: its KV cache lies in the pool's memory, its prefix cache is the pool's index.

vLLM itself is imported with the classes that it looks up here by name, not before.
"""

from typing import TYPE_CHECKING, Any

from kvharbor.engines.vllm.errors import (
    ContractBroken,
    FeatureUnsupported,
    PluginIncomplete,
    PoolLost,
    SettingInvalid,
    VersionUnsupported,
    VllmEngineError,
)
from kvharbor.engines.vllm.settings import Settings, engine_args, serve_arguments
from kvharbor.engines.vllm.versions import importing_vllm

if TYPE_CHECKING:
    from kvharbor.engines.vllm.scheduler import HarborScheduler
    from kvharbor.engines.vllm.worker import HarborWorker

__all__ = [
    "ContractBroken",
    "FeatureUnsupported",
    "HarborScheduler",
    "HarborWorker",
    "PluginIncomplete",
    "PoolLost",
    "SettingInvalid",
    "Settings",
    "VersionUnsupported",
    "VllmEngineError",
    "engine_args",
    "serve_arguments",
]


def __getattr__(name: str) -> Any:
    with importing_vllm():
        if name == "HarborWorker":
            from kvharbor.engines.vllm.worker import HarborWorker

            return HarborWorker
        if name == "HarborScheduler":
            from kvharbor.engines.vllm.scheduler import HarborScheduler

            return HarborScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
