"""How large a memory: as people write it."""

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Final

from kvharbor.server.errors import CommandError

SWEEP: Final = ("1%", "2.5%", "5%", "10%", "25%", "50%", "100%")
"""What is tried where nothing is asked for."""
_MAX_BLOCKS = (1 << 31) - 1
_FORM = re.compile(r"(\d{1,12})(\.\d{1,6})?(%)?", re.ASCII)


def block_counts(asked: Iterable[str], unique_block_count: int) -> list[int]:
    """Returns the capacities of "1828" or "2.5%", a share of the distinct blocks; each once, the smallest first."""
    return sorted({_block_count(text, unique_block_count) for text in asked})


def _block_count(text: str, unique_block_count: int) -> int:
    form = _FORM.fullmatch(text.strip())
    if form is None or (form[2] and not form[3]):
        raise CommandError(f"{text[:40]!r} is no number of blocks; write 1828, or 2.5% of the trace's distinct blocks")
    if form[3]:
        percent = Fraction(form[1] + (form[2] or ""))
        count = math.ceil(percent * unique_block_count / 100)
    else:
        count = int(form[1])
    if not 1 <= count <= _MAX_BLOCKS:
        raise CommandError(f"{text!r} is {count} blocks, and a pool has 1 to {_MAX_BLOCKS}")
    return count
