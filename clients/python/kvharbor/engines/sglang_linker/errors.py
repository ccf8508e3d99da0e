"""What the linker refuses. What the service refuses comes through unchanged, as the client's own errors."""

from typing import ClassVar


class LinkerUnsupported(Exception):
    """The engine is configured for what the linker does not copy, or would copy wrong in silence."""

    reason: ClassVar[str] = "LINKER_UNSUPPORTED"

    def __init__(self, feature: str, value: object, remedy: str) -> None:
        self.feature = feature
        self.value = value
        super().__init__(f"SGLang linked to a kvharbor pool does not support {feature} (here {value}): {remedy}")


class LinkerSettingInvalid(Exception):
    """One of the settings in SGLang's linker configuration is missing or wrong."""

    reason: ClassVar[str] = "LINKER_SETTING_INVALID"

    def __init__(self, setting: str, value: object, limit: str) -> None:
        self.setting = setting
        self.value = value
        super().__init__(f'linker_extra_config["{setting}"] is {value!r}, must be {limit}')
