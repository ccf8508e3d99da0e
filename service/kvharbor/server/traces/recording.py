"""kvharbor's own format: hashes of prefixes, one for each whole block, and never text.

A header, `{"kvharbor_trace": 1, "block_tokens": tokens}`, then
`{"arrival_ms": ms, "input_tokens": tokens, "output_tokens": tokens, "duration_ms": ms or absent, "blocks": [...]}`;
a block's hash, 8 to 64 lower-case hexadecimal digits, is of everything up to its end. Other fields are ignored.
"""

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvharbor.server.traces.entry import Entry, Format, joined
from kvharbor.server.traces.lines import MAX_TOKENS, Line

VERSION = 1
_HASH = re.compile("[0-9a-f]{8,64}")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request to write: `block_hashes` of its whole blocks, in order."""

    arrival_ms: int
    input_tokens: int
    output_tokens: int
    duration_ms: int
    block_hashes: tuple[str, ...]


def write(path: Path, block_tokens: int, requests: Iterable[Recorded]) -> None:
    """Writes a trace, as gzip where the name ends with .gz; the same requests make the same bytes."""
    with path.open("wb") as file:
        if path.suffix == ".gz":
            # Without a time and a name in its head.
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                packed.writelines(_encoded(block_tokens, requests))
        else:
            file.writelines(_encoded(block_tokens, requests))


def _encoded(block_tokens: int, requests: Iterable[Recorded]) -> Iterable[bytes]:
    yield _line({"kvharbor_trace": VERSION, "block_tokens": block_tokens})
    for request in requests:
        yield _line(
            {
                "arrival_ms": request.arrival_ms,
                "input_tokens": request.input_tokens,
                "output_tokens": request.output_tokens,
                "duration_ms": request.duration_ms,
                "blocks": request.block_hashes,
            }
        )


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def recognised(line: Line) -> Format | None:
    """Returns how to read the file, if this is its first line."""
    if "kvharbor_trace" not in line.fields:
        return None
    if line.fields["kvharbor_trace"] != VERSION:
        raise line.bad(
            "kvharbor_trace", line.fields["kvharbor_trace"], str(VERSION), "read it with the version that wrote it"
        )
    file_tokens = line.whole("block_tokens", least=1, most=MAX_TOKENS)

    def entry(line: Line, block_tokens: int) -> Entry:
        input_tokens = line.tokens("input_tokens")
        hashes = _hashes(line)
        if len(hashes) != input_tokens // file_tokens:
            expected = f"{input_tokens // file_tokens} hashes, one for each whole {file_tokens} of input_tokens"
            raise line.bad("blocks", f"{len(hashes)} hashes", expected)
        return Entry(
            line.milliseconds("arrival_ms"),
            input_tokens,
            line.tokens("output_tokens"),
            line.milliseconds_if_any("duration_ms"),
            joined(hashes, block_tokens // file_tokens),
        )

    return Format("kvharbor", file_tokens, entry, header_count=1)


def _hashes(line: Line) -> list[str]:
    listed = line.listed("blocks")
    for place, value in enumerate(listed):
        if not isinstance(value, str) or not _HASH.fullmatch(value):
            raise line.bad(f"blocks[{place}]", value, "8 to 64 lower-case hexadecimal digits")
    return listed  # type: ignore[return-value]
