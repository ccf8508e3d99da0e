"""Azure's format: arrival and lengths, and nothing of what the prompts have in common.

`TIMESTAMP,ContextTokens,GeneratedTokens`, then `2023-11-16 18:17:03.9799600,4808,10`
"""

from datetime import datetime

from kvharbor.server.traces.entry import Entry, Format
from kvharbor.server.traces.lines import MAX_TOKENS, Line

_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MICROSECOND_CHARS = len("2023-11-16 18:17:03.979960")
_EPOCH = datetime(1970, 1, 1)


def recognised(line: Line) -> Format | None:
    """Returns how to read the file, if this is its first line."""
    if line.text.decode(errors="replace").strip().split(",") != list(_FIELDS):
        return None
    return Format("azure", None, _entry, header_count=1, has_blocks=False)


def _entry(line: Line, _block_tokens: int) -> Entry:
    cells = line.text.decode(errors="replace").strip().split(",")
    if len(cells) != len(_FIELDS):
        raise line.bad("the line", f"{len(cells)} cells", f"{len(_FIELDS)} cells: {','.join(_FIELDS)}")
    return Entry(_milliseconds(line, cells[0]), _tokens(line, 1, cells[1]), _tokens(line, 2, cells[2]))


def _milliseconds(line: Line, cell: str) -> float:
    try:
        # Python reads microseconds; the file has a digit more.
        since = datetime.fromisoformat(cell[:_MICROSECOND_CHARS]) - _EPOCH
    except (ValueError, TypeError):
        raise line.bad(_FIELDS[0], cell, "a time such as 2023-11-16 18:17:03.979960") from None
    return since.total_seconds() * 1000


def _tokens(line: Line, place: int, cell: str) -> int:
    count = int(cell) if cell.isascii() and cell.isdigit() and len(cell) <= len(str(MAX_TOKENS)) else -1
    if not 0 <= count <= MAX_TOKENS:
        raise line.bad(_FIELDS[place], cell, f"a whole number, 0 to {MAX_TOKENS}")
    return count
