"""The format kvrun1: names of prefixes as runs of consecutive numbers.

A header, `{"format": "kvrun1", "block_tokens": tokens, "full_blocks_only": bool}`, then
`{"t": ms, "in": tokens, "out": tokens, "d": duration in ms or absent, "h": [first_id, count, ...]}`
"""

from itertools import chain

from kvharbor.server.traces.entry import Entry, Format, joined
from kvharbor.server.traces.lines import MAX_TOKENS, Line


def recognised(line: Line) -> Format | None:
    """Returns how to read the file, if this is its first line."""
    if line.fields.get("format") != "kvrun1":
        return None
    file_tokens = line.whole("block_tokens", least=1, most=MAX_TOKENS)
    full_only = line.fields.get("full_blocks_only", False)

    def entry(line: Line, block_tokens: int) -> Entry:
        input_tokens = line.tokens("in")
        runs = line.pairs("h")
        # Before they are written out: a count is quickly written and may stand for any number of ids.
        count = sum(count for _, count in runs)
        expected = input_tokens // file_tokens if full_only else -(-input_tokens // file_tokens)
        if count != expected:
            raise line.bad("h", f"{count} ids", f"{expected} ids, one for each {file_tokens} of in")
        ids = list(chain.from_iterable(range(first, first + count) for first, count in runs))
        return Entry(
            line.milliseconds("t"),
            input_tokens,
            line.tokens("out"),
            line.milliseconds_if_any("d"),
            joined(ids, block_tokens // file_tokens),
        )

    return Format("kvrun1", file_tokens, entry, header_count=1)
