"""What a user says of the pool, as it travels in SGLang's linker configuration."""

import json
import shlex
from dataclasses import asdict, dataclass
from typing import Any

from kvharbor.client.sizes import size_bytes

MODULE = "kvharbor.engines.sglang_linker"
LINKER = "HarborLinker"


@dataclass(frozen=True, slots=True)
class LinkerSettings:
    """The settings of one engine. All travel as JSON.

    `model` names what the engine computes, weights included: two engines that give the same name must compute the same
    K and V. `endpoint` is the service's Unix socket; empty: as `kvharbor.client.connect()` finds it. `size` of the pool
    is needed where the engine is the first to open it; 0: what is left of the service's memory.
    """

    model: str
    endpoint: str = ""
    pool: str = "sglang"
    size: str | int = 0
    timeout_s: float = 10.0

    @property
    def pool_bytes(self) -> int | None:
        """The size to open the pool with."""
        return size_bytes(self.size, "size") if self.size else None


def server_arguments(settings: LinkerSettings) -> str:
    """Returns the options for `python -m sglang.launch_server` that link an engine to a pool."""
    config: dict[str, Any] = {
        "linker": LINKER,
        "linker_module_path": MODULE,
        "linker_extra_config": asdict(settings),
    }
    words = [
        "--unified-cache-external-linker-backend",
        "dynamic",
        "--unified-cache-external-linker-config",
        json.dumps(config),
    ]
    return shlex.join(words)
