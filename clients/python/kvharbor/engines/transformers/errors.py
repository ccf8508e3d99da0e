"""What the transformers engine refuses, sorted by what the caller should do.

    TransformersEngineError
      caller's mistake   RequestInvalid, AttentionUnsupported, CacheForeign
      not there          ModelMissing

What the pool refuses comes through unchanged, as the client's own errors.
"""

from typing import ClassVar


class TransformersEngineError(Exception):
    """The root of everything that this engine raises on purpose."""

    reason: ClassVar[str] = "TRANSFORMERS_ENGINE_ERROR"


class RequestInvalid(TransformersEngineError):
    """An argument of a generation is outside what the model can do; nothing was allocated."""

    reason = "REQUEST_INVALID"

    def __init__(self, field: str, value: object, limit: str, remedy: str) -> None:
        self.field = field
        self.value = value
        self.limit = limit
        self.remedy = remedy
        super().__init__(f"{field} is {value}, must be {limit}: {remedy}")


class AttentionUnsupported(TransformersEngineError):
    """The model asks of attention what this engine does not compute, and would get wrong in silence."""

    reason = "ATTENTION_UNSUPPORTED"

    def __init__(self, feature: str, value: object, remedy: str) -> None:
        self.feature = feature
        self.value = value
        self.remedy = remedy
        super().__init__(f"attention over mapped blocks does not support {feature} (here {value}): {remedy}")


class CacheForeign(TransformersEngineError):
    """The attention function "kvharbor" got K that no kvharbor cache wrote."""

    reason = "CACHE_FOREIGN"

    def __init__(self, module: str) -> None:
        self.module = module
        super().__init__(
            f"{module} attends with kvharbor's function but without kvharbor's cache, or changes K between the"
            f" two: call the model through kvharbor's Worker, or give it another attn_implementation"
        )


class ModelMissing(TransformersEngineError):
    """The model is neither in an installed package nor converted in the cache."""

    reason = "MODEL_MISSING"

    def __init__(self, package: str, *, wanted: str, remedy: str) -> None:
        self.package = package
        self.wanted = wanted
        self.remedy = remedy
        super().__init__(f"neither the installed packages nor the cache have {wanted} ({package}): {remedy}")
