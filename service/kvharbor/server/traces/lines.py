"""Lines of a trace file, and their fields, checked one by one."""

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from kvharbor.server.errors import CommandError
from kvharbor.server.traces.errors import MISSING, BadTrace

MAX_WHOLE: Final = 1 << 53
"""Whole numbers beyond this are not the same in every reader of JSON."""
MAX_TOKENS: Final = 1 << 28
_GZIP_MAGIC = b"\x1f\x8b"


class Line:
    """One line. What is asked of it is there and within its limits, or BadTrace says what is not."""

    def __init__(self, path: str, number: int, text: bytes) -> None:
        self.path = path
        self.number = number
        self.text = text
        self._fields: dict[str, object] | None = None

    def bad(self, field: str, value: object, limit: str, remedy: str = "correct the line or leave it out") -> BadTrace:
        """Returns the error that says what is wrong here."""
        return BadTrace(self.path, self.number, field=field, value=value, limit=limit, remedy=remedy)

    def missing(self, field: str) -> BadTrace:
        """Returns the error for a line without a field."""
        return BadTrace(
            self.path, self.number, field=field, value=MISSING, limit="there", remedy="correct the line or leave it out"
        )

    @property
    def fields(self) -> dict[str, object]:
        """The JSON object that the line is."""
        if self._fields is None:
            try:
                parsed = json.loads(self.text)
            except (ValueError, RecursionError):
                parsed = None
            if not isinstance(parsed, dict):
                raise self.bad("the line", self.text.decode(errors="replace").strip(), "one JSON object")
            self._fields = parsed
        return self._fields

    def _value(self, field: str) -> object:
        if field not in self.fields:
            raise self.missing(field)
        return self.fields[field]

    def whole(self, field: str, *, least: int = 0, most: int = MAX_WHOLE) -> int:
        """Returns a whole number."""
        value = self._value(field)
        if type(value) is not int or not least <= value <= most:
            raise self.bad(field, value, f"a whole number, {least} to {most}")
        return value

    def tokens(self, field: str) -> int:
        """Returns a number of tokens."""
        return self.whole(field, most=MAX_TOKENS)

    def milliseconds(self, field: str) -> float:
        """Returns a time or duration, a whole number if the line has one."""
        value = self._value(field)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 0 <= value <= MAX_WHOLE:  # type: ignore[arg-type, operator]
            raise self.bad(field, value, f"milliseconds, 0 to {MAX_WHOLE}")
        return value  # type: ignore[return-value]

    def milliseconds_if_any(self, field: str) -> float | None:
        """Returns a duration, or None where the line has none."""
        return self.milliseconds(field) if field in self.fields else None

    def listed(self, field: str) -> list[object]:
        """Returns a list, whatever is in it."""
        value = self._value(field)
        if not isinstance(value, list):
            raise self.bad(field, value, "a list")
        return value

    def wholes(self, field: str) -> list[int]:
        """Returns a list of whole numbers."""
        listed = self.listed(field)
        for place, value in enumerate(listed):
            if type(value) is not int or not 0 <= value <= MAX_WHOLE:
                raise self.bad(f"{field}[{place}]", value, f"a whole number, 0 to {MAX_WHOLE}")
        return listed  # type: ignore[return-value]

    def pairs(self, field: str) -> list[tuple[int, int]]:
        """Returns pairs that are written one after the other, [a, b, a, b]; the second of each is a count."""
        listed = self.wholes(field)
        if len(listed) % 2:
            raise self.bad(field, f"{len(listed)} numbers", "pairs: an even count of numbers")
        for place, count in enumerate(listed[1::2]):
            if not 1 <= count <= MAX_TOKENS:
                raise self.bad(f"{field}[{2 * place + 1}]", count, f"a count, 1 to {MAX_TOKENS}")
        return list(zip(listed[::2], listed[1::2], strict=True))


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the lines of a file, plain or gzip, that are not empty."""
    number = 0
    try:
        with _opened(path) as file:
            for number, text in enumerate(file, start=1):
                if not text.isspace():
                    yield Line(str(path), number, text)
    except (gzip.BadGzipFile, zlib.error, EOFError) as broken:
        raise BadTrace(
            str(path),
            number + 1,
            field="the file",
            value=broken,
            limit="whole gzip data",
            remedy="fetch or compress it again",
        ) from None
    except OSError as failure:
        raise CommandError(f"cannot read {path}: {failure.strerror}") from None


def _opened(path: Path) -> BinaryIO:
    file = path.open("rb")
    try:
        is_gzip = file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
    except BaseException:
        file.close()
        raise
    if not is_gzip:
        return file
    file.close()
    return gzip.open(path, "rb")  # type: ignore[return-value]
