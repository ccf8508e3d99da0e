"""What is wrong with a trace."""

from typing import Final

from kvharbor.server.errors import CommandError

MISSING: Final = object()
"""Stands for the value of a field that is not there."""
_SHOWN_CHARS = 40


class BadTrace(CommandError):
    """A file is no trace, or a line of it is not what its format says. `line` counts from 1."""

    def __init__(self, path: str, line: int, *, field: str, value: object, limit: str, remedy: str) -> None:
        self.path = path
        self.line = line
        self.field = field
        self.value = value
        self.limit = limit
        self.remedy = remedy
        if value is MISSING:
            super().__init__(f"{path}, line {line}: {field} is missing; {remedy}")
            return
        shown = str(value)
        if len(shown) > _SHOWN_CHARS:
            shown = f"{shown[:_SHOWN_CHARS]}…"
        super().__init__(f"{path}, line {line}: {field} is {shown!r}, must be {limit}; {remedy}")
