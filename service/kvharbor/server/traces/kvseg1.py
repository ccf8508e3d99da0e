"""The format kvseg1: prompts as segments of text that recur, to be cut into blocks of any size.

A header, `{"format": "kvseg1"}`, then
`{"t": ms, "in": tokens, "out": tokens, "d": duration in ms or absent, "seg": [segment_id, tokens, ...]}`;
token j of a segment is the same wherever the segment stands.
"""

from kvharbor.server.traces.entry import Entry, Format
from kvharbor.server.traces.lines import MAX_TOKENS, Line
from kvharbor.server.traces.segments import whole_blocks


def recognised(line: Line) -> Format | None:
    """Returns how to read the file, if this is its first line."""
    if line.fields.get("format") != "kvseg1":
        return None
    return Format("kvseg1", None, _entry, header_count=1)


def _entry(line: Line, block_tokens: int) -> Entry:
    segments = line.pairs("seg")
    # Its "in" is what a tokenizer has counted; what can be shared are the segments.
    input_tokens = sum(tokens for _, tokens in segments)
    if input_tokens > MAX_TOKENS:
        raise line.bad("seg", f"{input_tokens} tokens", f"at most {MAX_TOKENS} tokens")
    return Entry(
        line.milliseconds("t"),
        input_tokens,
        line.tokens("out"),
        line.milliseconds_if_any("d"),
        whole_blocks(segments, block_tokens),
    )
