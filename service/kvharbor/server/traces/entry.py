"""One request as a file has it, before its blocks have names."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvharbor.server.traces.lines import Line


@dataclass(frozen=True, slots=True)
class Entry:
    """One request. `contents` tell blocks apart that stand behind the same ones."""

    arrival_ms: float
    input_tokens: int
    output_tokens: int
    duration_ms: float | None = None
    contents: Iterable[Hashable] = ()


@dataclass(frozen=True, slots=True)
class Format:
    """How to read a file. `header_count` lines come first.

    `block_tokens` is the size of its blocks, None where they can be cut to any size; `has_blocks` is False for
    files that know lengths only. `entry` reads a line, for blocks of the given size.
    """

    name: str
    block_tokens: int | None
    entry: Callable[[Line, int], Entry]
    header_count: int = 0
    has_blocks: bool = True


def joined(contents: Sequence[Hashable], per_block: int) -> Iterable[Hashable]:
    """Makes larger blocks, of `per_block` of the file's; a rest is no whole block and can never be shared."""
    if per_block == 1:
        return contents
    return _groups(contents, per_block)


def _groups(contents: Sequence[Hashable], per_block: int) -> Iterator[Hashable]:
    for start in range(0, len(contents) - per_block + 1, per_block):
        yield tuple(contents[start : start + per_block])
