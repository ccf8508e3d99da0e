"""Amounts of memory, for people to read."""

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def exact_size(size_bytes: int) -> str:
    """Returns the bytes and, from a KiB on, the amount as well: "12 bytes", "1536 bytes (1.5 KiB)".

    For refusals: what was needed and what is there may be the same in any unit.
    """
    power = min((max(size_bytes, 1).bit_length() - 1) // 10, len(_UNITS))
    amount = f" ({size_bytes / 1024**power:.1f} {_UNITS[power - 1]})" if power else ""
    return f"{size_bytes} bytes{amount}"
