"""What the vLLM engine refuses, sorted by what the caller should do.

    VllmEngineError
      caller's mistake   SettingInvalid, FeatureUnsupported, PluginIncomplete
      another vLLM       VersionUnsupported, ContractBroken
      start it again     PoolLost

What the service refuses at the start comes through unchanged, as the client's own errors: LayoutMismatch names every
field in which a pool differs from what the engine needs.
"""

import functools
from collections.abc import Callable
from typing import ClassVar, ParamSpec, TypeVar

from kvharbor.client import EpochEnded, SessionGone

P = ParamSpec("P")
T = TypeVar("T")


class VllmEngineError(Exception):
    """The root of everything that this engine raises on purpose."""

    reason: ClassVar[str] = "VLLM_ENGINE_ERROR"


class SettingInvalid(VllmEngineError):
    """One of the settings in `additional_config["kvharbor"]` is missing or wrong."""

    reason = "SETTING_INVALID"

    def __init__(self, setting: str, value: object, limit: str) -> None:
        self.setting = setting
        self.value = value
        super().__init__(f'additional_config["kvharbor"]["{setting}"] is {value!r}, must be {limit}')


class FeatureUnsupported(VllmEngineError):
    """The engine is configured for what blocks of a shared pool do not do, or would do wrong in silence."""

    reason = "FEATURE_UNSUPPORTED"

    def __init__(self, feature: str, value: object, remedy: str) -> None:
        self.feature = feature
        self.value = value
        super().__init__(f"vLLM on a kvharbor pool does not support {feature} (here {value}): {remedy}")


class PluginIncomplete(VllmEngineError):
    """Only the scheduler or only the worker is kvharbor's: alone, each would overwrite blocks of other engines."""

    reason = "PLUGIN_INCOMPLETE"

    def __init__(self, part: str, found: object) -> None:
        super().__init__(
            f"{part} of this engine is {found}, and not kvharbor's: pass everything that"
            f" kvharbor.engines.vllm.engine_args returns"
        )


class VersionUnsupported(VllmEngineError):
    """This vLLM has not been tested; `allow_untested_version` tries it all the same."""

    reason = "VERSION_UNSUPPORTED"

    def __init__(self, version: str, tested: str) -> None:
        super().__init__(
            f"vLLM {version} has not been tested with kvharbor, which knows {tested}: install one of these, or set"
            f' additional_config["kvharbor"]["allow_untested_version"] and run the tests of tests/engines first'
        )


class ContractBroken(VllmEngineError):
    """vLLM did not do what its tested versions do, so going on could overwrite blocks of other engines."""

    reason = "CONTRACT_BROKEN"


class PoolLost(VllmEngineError):
    """The session has ended, or the service's epoch, and with it all the KV that this engine's requests have."""

    reason = "POOL_LOST"

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"the pool of this engine is lost, and with it all KV: start the engine again ({cause})")


def needs_pool(call: Callable[P, T]) -> Callable[P, T]:
    """Has a call of the engine's raise PoolLost where the client says that session or epoch have ended."""

    @functools.wraps(call)
    def called(*arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return call(*arguments, **keywords)
        except (SessionGone, EpochEnded) as gone:
            raise PoolLost(gone) from gone

    return called
