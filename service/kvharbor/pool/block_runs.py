"""Blocks and chains of contents as block calls name them: frozen values, safe to keep."""

from array import array
from dataclasses import dataclass

from kvharbor.pool.digest import ExtraKey
from kvharbor.pool.hints import NO_HINTS, Hints


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks by id, each in its generation."""

    block_ids: "array[int]"
    generations: "array[int]"

    def __len__(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class Chain:
    """Contents of consecutive whole blocks, and their namespace.

    With a scheme, `keys` has 32 bytes a block; without, `token_ids` has their tokens, and `extra_keys` count from its
    start. `hints` are about those that a commit publishes.
    """

    token_ids: bytes = b""
    keys: bytes = b""
    extra_keys: tuple[ExtraKey, ...] = ()
    version: str = ""
    adapter: str = ""
    salt: bytes = b""
    scheme: str = ""
    hints: Hints = NO_HINTS
