"""Mooncake's format: a name for each 512 tokens of a prompt's prefix, the last block perhaps in part.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`
"""

from kvharbor.server.traces.entry import Entry, Format, joined
from kvharbor.server.traces.lines import Line

BLOCK_TOKENS = 512


def recognised(line: Line) -> Format | None:
    """Returns how to read the file, if this is its first line."""
    if "hash_ids" not in line.fields:
        return None
    return Format("mooncake", BLOCK_TOKENS, _entry)


def _entry(line: Line, block_tokens: int) -> Entry:
    input_tokens = line.tokens("input_length")
    ids = line.wholes("hash_ids")
    expected = -(-input_tokens // BLOCK_TOKENS)
    if len(ids) != expected:
        raise line.bad("hash_ids", f"{len(ids)} ids", f"{expected} ids, one for each {BLOCK_TOKENS} of input_length")
    return Entry(
        line.milliseconds("timestamp"),
        input_tokens,
        line.tokens("output_length"),
        contents=joined(ids, block_tokens // BLOCK_TOKENS),
    )
