"""Sizes as people write them."""

import re

from kvharbor.client.errors import InvalidField

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "PIB": 2**50,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def size_bytes(size: str | int | None, field: str = "size") -> int:
    """Returns the bytes of "1GiB", "1.5 GB" or an int; 0 for None. Raises InvalidField, for "4096" too."""
    if size is None:
        return 0
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match and not match[2]:
        remedy = f"write {match[1]}B for bytes, or e.g. {match[1]}MiB"
        raise InvalidField.of(field, size, limit="a number and a unit", remedy=remedy)
    # What is less than a byte must not become 0, which means all that there is.
    if match and (unit := _UNITS.get(match[2].upper())) and (size_in_bytes := round(float(match[1]) * unit)) > 0:
        return size_in_bytes
    raise InvalidField.of(
        field, size, limit='a positive number of bytes, or text such as "512MiB"', remedy="correct the size"
    )
