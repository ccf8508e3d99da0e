"""What a user says of the pool, as it travels in SGLang's linker configuration."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from kvharbor.client.sizes import size_bytes
from kvharbor.engines.setting_checks import unknown_setting, wrong_setting
from kvharbor.engines.sglang_linker.errors import LinkerSettingInvalid

MODULE = "kvharbor.engines.sglang_linker"
LINKER = "HarborLinker"


@dataclass(frozen=True, slots=True)
class LinkerSettings:
    """The settings of one engine. All travel as JSON.

    `model` names what the engine computes, weights included: two engines that give the same name must compute the same
    K and V. `endpoint` is the service's Unix socket; empty: as `kvharbor.client.connect()` finds it. `size` of the pool
    is needed where the engine is the first to open it; 0: what is left of the service's memory. `instance` is what the
    service's statistics call this engine, such as the model server's name; empty: by its pid.
    """

    model: str
    endpoint: str = ""
    pool: str = "sglang"
    size: str | int = 0
    timeout_s: float = 10.0
    instance: str = ""

    @classmethod
    def of(cls, extra_config: Mapping[str, Any] | None) -> Self:
        """Reads the settings as they come back from SGLang, or raises LinkerSettingInvalid."""
        given = extra_config or {}
        if (wrong := unknown_setting(given, [field.name for field in fields(cls)])) is not None:
            raise LinkerSettingInvalid(*wrong)
        return cls(**{"model": "", **given}).checked()

    def checked(self) -> Self:
        """Returns itself, or raises LinkerSettingInvalid."""
        if (wrong := wrong_setting(asdict(self))) is not None:
            raise LinkerSettingInvalid(*wrong)
        if not self.model:
            raise LinkerSettingInvalid("model", self.model, "a name for the weights")
        return self

    @property
    def pool_bytes(self) -> int | None:
        """The size to open the pool with."""
        return size_bytes(self.size, "size") if self.size else None


def server_arguments(settings: LinkerSettings) -> str:
    """Returns the options for `python -m sglang.launch_server` that link an engine to a pool."""
    config: dict[str, Any] = {
        "linker": LINKER,
        "linker_module_path": MODULE,
        "linker_extra_config": asdict(settings.checked()),
    }
    words = [
        "--unified-cache-external-linker-backend",
        "dynamic",
        "--unified-cache-external-linker-config",
        json.dumps(config),
    ]
    return shlex.join(words)
