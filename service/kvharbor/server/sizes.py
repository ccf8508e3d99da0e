"""Amounts of memory as people write them: "2GiB", "1.5GB", "80%"."""

import re
from dataclasses import dataclass
from decimal import Decimal

_UNIT_BYTES = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_FORM = re.compile(r"(\d{1,20}(?:\.\d{1,9})?)\s*([A-Za-z]+|%)?", re.ASCII)
_UNITS = "B, KB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB (powers of 1024)"


@dataclass(frozen=True, slots=True)
class Share:
    """A percentage of the room there is."""

    percent: Decimal

    def of(self, room_bytes: int) -> int:
        """Returns that share of `room_bytes`, rounded down."""
        return int(room_bytes * self.percent / 100)

    def __str__(self) -> str:
        return f"{self.percent}%"


def parse_size(text: str) -> int:
    """Returns the bytes that `text` names, rounded down to a whole byte; at least 1.

    "GB" is 10^9 bytes and "GiB" 2^30, in either case of letters. Raises ValueError, which names the remedy,
    for a bare number, an unknown unit, a percentage, zero and anything negative.
    """
    number, unit = _split(text)
    if unit == "%":
        raise ValueError(f"{text!r} is a share, which has no meaning here; write an amount, e.g. 2GiB")
    size_bytes = int(number * _UNIT_BYTES[unit])
    if size_bytes < 1:
        raise ValueError(f"{text!r} is less than one byte; write an amount, e.g. 2GiB")
    return size_bytes


def parse_size_or_share(text: str) -> int | Share:
    """Returns bytes as `parse_size` does, or the Share that a percentage over 0 and up to 100 names."""
    number, unit = _split(text)
    if unit != "%":
        return parse_size(text)
    if not 0 < number <= 100:
        raise ValueError(f"{text!r} is no share of memory; write more than 0% and at most 100%")
    return Share(number)


def format_size(size_bytes: int) -> str:
    """Returns the amount for people, in the largest binary unit that leaves at least 1: "1.5 GiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


def exact_size(size_bytes: int) -> str:
    """Returns the bytes and, from a KiB on, the amount as well, as `kvharbor.gpumem` says it, which loads numpy."""
    return f"{size_bytes} bytes" if size_bytes < 1024 else f"{size_bytes} bytes ({format_size(size_bytes)})"


def _split(text: str) -> tuple[Decimal, str]:
    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise ValueError(f"{text[:40]!r} is no size; write a positive number and a unit, e.g. 2GiB")
    number, unit = Decimal(form[1]), form[2]
    if not number:
        raise ValueError(f"{text!r} is nothing; write a positive number and a unit, e.g. 2GiB")
    if unit is None:
        raise ValueError(f"{text!r} has no unit; write e.g. {form[1]}MiB or {form[1]}GiB, or {form[1]}B for bytes")
    if unit != "%" and unit.lower() not in _UNIT_BYTES:
        raise ValueError(f"{text!r} has the unknown unit {unit!r}; use {_UNITS}")
    return number, unit.lower()
