"""What is wrong with the settings of an engine: found before it loads its weights, which takes minutes."""

from collections.abc import Iterable, Mapping

from kvharbor.client import InvalidField
from kvharbor.client.options import positive_timeout
from kvharbor.client.sizes import size_bytes

_TEXTS = ("endpoint", "pool", "model", "instance")
_NEEDED = ("pool",)
_INSTANCE_BYTES = 128


def wrong_setting(settings: Mapping[str, object]) -> tuple[str, object, str] | None:
    """Returns the first wrong one with its value and what it must be; None if none is. `size` 0 is left out."""
    for name, value in settings.items():
        if name in _TEXTS and not isinstance(value, str):
            return name, value, "text"
        if name in _NEEDED and not value:
            return name, value, "a name"
        if name == "instance" and not (len(str(value).encode()) <= _INSTANCE_BYTES and str(value).isprintable()):
            return name, value, f"printable text of at most {_INSTANCE_BYTES} bytes"
        if name == "allow_untested_version" and not isinstance(value, bool):
            return name, value, "true or false"
        try:
            if name == "size" and value != 0:
                size_bytes(value)  # type: ignore[arg-type]
            elif name == "timeout_s":
                positive_timeout(value)  # type: ignore[arg-type]
        except InvalidField as wrong:
            return name, value, wrong.metadata["limit"]
    return None


def unknown_setting(given: Mapping[str, object], known: Iterable[str]) -> tuple[str, object, str] | None:
    """Returns the first whose name is not among the known ones, as `wrong_setting` does."""
    names = [*known]
    return next(
        ((name, value, f"one of {', '.join(names)}") for name, value in given.items() if name not in names), None
    )
