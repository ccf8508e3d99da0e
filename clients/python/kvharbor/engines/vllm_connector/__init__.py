"""vLLM engines that copy blocks between their own KV caches and one pool, by vLLM's interface for KV connectors.

vLLM itself is imported with the connector, which it looks up here by name, not before.
"""

from typing import TYPE_CHECKING, Any

from kvharbor.engines.vllm.versions import importing_vllm
from kvharbor.engines.vllm_connector.settings import connector_args

if TYPE_CHECKING:
    from kvharbor.engines.vllm_connector.connector import HarborConnector

__all__ = ["HarborConnector", "connector_args"]


def __getattr__(name: str) -> Any:
    if name == "HarborConnector":
        with importing_vllm():
            from kvharbor.engines.vllm_connector.connector import HarborConnector

        return HarborConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
