"""What changed, for watchers. Each event carries the revision that made it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A chain was published: each block is the parent of the next. `parent_digest` is the first one's parent."""

    revision: int
    tenant: str
    parent_digest: bytes
    digests: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left the index."""

    revision: int
    tenant: str
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PinEnded:
    """A warm pin ended, because its time ran out or because it was ended."""

    revision: int
    tenant: str
    name: str
    expired: bool


Event = BlocksStored | BlocksRemoved | PinEnded
