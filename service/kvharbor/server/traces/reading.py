"""From a file to a trace: which format it is, in what blocks it is read, and what its blocks are called."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Final

from kvharbor.server.errors import CommandError
from kvharbor.server.traces import azure, kvrun1, kvseg1, mooncake, recording
from kvharbor.server.traces.entry import Format
from kvharbor.server.traces.errors import BadTrace
from kvharbor.server.traces.lines import Line, read_lines
from kvharbor.server.traces.names import Names
from kvharbor.server.traces.trace import Request, Trace, by_arrival

DEFAULT_BLOCK_TOKENS: Final = 64
"""For files that can be cut into blocks of any size."""
MAX_REQUEST_BLOCKS: Final = 1 << 19
"""Of input and output together: what a pool gives to one sequence."""

_JSON_FORMATS: tuple[Callable[[Line], Format | None], ...] = (
    recording.recognised,
    kvrun1.recognised,
    kvseg1.recognised,
    mooncake.recognised,
)
_KNOWN = "the first line of a Mooncake, kvrun1, kvseg1, Azure or kvharbor trace"


def read_trace(path: Path, block_tokens: int | None = None) -> Trace:
    """Reads requests and the names of their blocks; raises BadTrace, also for a file that has no blocks.

    `block_tokens` is by default the file's own size, else DEFAULT_BLOCK_TOKENS; it must be a multiple of the former.
    """
    return _read(path, block_tokens, need_blocks=True)


def read_lengths(path: Path, block_tokens: int | None = None) -> Trace:
    """Reads the same, and files that have lengths only: none of their requests has a block with a name."""
    return _read(path, block_tokens, need_blocks=False)


def _read(path: Path, block_tokens: int | None, *, need_blocks: bool) -> Trace:
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise BadTrace(str(path), 1, field="the file", value="empty", limit=_KNOWN, remedy="name another file")
    kind = _format_of(first)
    if need_blocks and not kind.has_blocks:
        raise first.bad(
            "the format", kind.name, "one that tells which blocks are shared", "use it with kvharbor simulate"
        )
    size = _block_tokens(path, kind, block_tokens)
    names = Names()
    requests = by_arrival(_requests(islice(chain((first,), lines), kind.header_count, None), kind, size, names))
    if not requests:
        raise CommandError(f"{path} has no requests, only a header: name another file")
    return Trace(path.name, size, requests, len(names))


def _format_of(first: Line) -> Format:
    if kind := azure.recognised(first):
        return kind
    for recognised in _JSON_FORMATS:
        if kind := recognised(first):
            return kind
    raise first.bad("the format", ", ".join(first.fields) or "{}", _KNOWN, "name another file")


def _block_tokens(path: Path, kind: Format, asked: int | None) -> int:
    own = kind.block_tokens
    if asked is None:
        return own or DEFAULT_BLOCK_TOKENS
    if own is not None and asked % own:
        raise CommandError(
            f"{path} is in blocks of {own} tokens, not {asked}: ask for a multiple of {own}, or for none"
        )
    return asked


def _requests(lines: Iterator[Line], kind: Format, block_tokens: int, names: Names) -> Iterator[Request]:
    for line in lines:
        entry = kind.entry(line, block_tokens)
        block_count = -(-entry.input_tokens // block_tokens) - (-entry.output_tokens // block_tokens)
        if block_count > MAX_REQUEST_BLOCKS:
            raise line.bad(
                "the request",
                f"{block_count} blocks of {block_tokens} tokens",
                f"of at most {MAX_REQUEST_BLOCKS} blocks",
                "leave it out or read it in larger blocks",
            )
        yield Request(
            entry.arrival_ms, entry.input_tokens, entry.output_tokens, entry.duration_ms, names.of(entry.contents)
        )
