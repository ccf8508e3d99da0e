"""SGLang engines that copy pages between their own KV caches and one pool, by SGLang's external linker interface.

SGLang itself is imported with the linker, which it looks up here by name, not before.
"""

from typing import TYPE_CHECKING, Any

from kvharbor.engines.sglang_linker.settings import LinkerSettings, server_arguments

if TYPE_CHECKING:
    from kvharbor.engines.sglang_linker.linker import HarborLinker

__all__ = ["HarborLinker", "LinkerSettings", "server_arguments"]


def __getattr__(name: str) -> Any:
    if name == "HarborLinker":
        from kvharbor.engines.sglang_linker.linker import HarborLinker

        return HarborLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
