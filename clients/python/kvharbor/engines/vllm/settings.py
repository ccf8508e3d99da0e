"""What a user says of the pool, as it travels in vLLM's `additional_config`, and the arguments for vLLM itself."""

import dataclasses
import json
import shlex
from dataclasses import dataclass
from typing import Any, Self

from kvharbor.client.sizes import size_bytes
from kvharbor.engines.setting_checks import unknown_setting, wrong_setting
from kvharbor.engines.vllm.errors import SettingInvalid

KEY = "kvharbor"
WORKER = "kvharbor.engines.vllm.HarborWorker"
SCHEDULER = "kvharbor.engines.vllm.HarborScheduler"
DEFAULT_POOL = "vllm"
DEFAULT_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one engine. All travel as JSON.

    `endpoint` is the service's Unix socket; empty: as `kvharbor.client.connect()` finds it. `size` of the pool counts
    where the engine is the first to open it; 0: what is left of the service's memory. `model` names what the engine
    computes; empty: a digest of its weights, which takes a second for each 500 MB. `instance` is what the service's
    statistics call this engine, such as the model server's name; empty: by its pid.
    """

    endpoint: str = ""
    pool: str = DEFAULT_POOL
    size: str | int = 0
    model: str = ""
    timeout_s: float = 10.0
    allow_untested_version: bool = False
    instance: str = ""

    @classmethod
    def of(cls, additional_config: object) -> Self:
        """Reads the settings, or raises SettingInvalid."""
        given = additional_config.get(KEY) if isinstance(additional_config, dict) else None
        if not isinstance(given, dict):
            raise SettingInvalid("endpoint", given, "set: pass what kvharbor.engines.vllm.engine_args returns")
        if (wrong := unknown_setting(given, [field.name for field in dataclasses.fields(cls)])) is not None:
            raise SettingInvalid(*wrong)
        return cls(**given).checked()

    def checked(self) -> Self:
        """Returns itself, or raises SettingInvalid."""
        if (wrong := wrong_setting(dataclasses.asdict(self))) is not None:
            raise SettingInvalid(*wrong)
        return self

    @property
    def pool_bytes(self) -> int:
        """The size to open the pool with, in bytes; 0 if none is given."""
        return size_bytes(self.size, "size") if self.size else 0

    def given(self) -> dict[str, Any]:
        """Returns what differs from the defaults."""
        defaults = Settings()
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != getattr(defaults, field.name)
        }


def engine_args(
    endpoint: str = "",
    pool: str = DEFAULT_POOL,
    *,
    size: str | int = 0,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    model: str = "",
    instance: str = "",
) -> dict[str, Any]:
    """Returns the keyword arguments that put a vLLM engine on a pool: `LLM(model, **engine_args(...))`.

    They go with those of your own, as long as none is named twice. `size` is that of the pool, in bytes or text such as
    "8GiB", and needed by the first engine only; the number of blocks follows from it. `block_tokens` is vLLM's
    block_size: a multiple of 32 on a CPU. `model` names the weights; without it they are hashed at start. On a GPU the
    pool's memory is the service's: set gpu_memory_utilization for weights and activations alone. `instance` is what
    `kvharbor stats` calls this engine.
    """
    settings = Settings(endpoint, pool, size, model, instance=instance).checked()
    return {
        "worker_cls": WORKER,
        "scheduler_cls": SCHEDULER,
        "block_size": block_tokens,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256",
        # Taken from the pool at start. Set here, so that vLLM does not look for free memory of its own before.
        "kv_cache_memory_bytes": settings.pool_bytes or 1,
        "additional_config": {KEY: settings.given()},
    }


def serve_arguments(
    endpoint: str = "",
    pool: str = DEFAULT_POOL,
    *,
    size: str | int = 0,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    model: str = "",
    instance: str = "",
) -> str:
    """Returns the same for a command line: `vllm serve MODEL <these>`."""
    words = []
    arguments = engine_args(endpoint, pool, size=size, block_tokens=block_tokens, model=model, instance=instance)
    for name, value in arguments.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return shlex.join(words)
