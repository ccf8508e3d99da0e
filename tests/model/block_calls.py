"""Short forms of a pool's block calls, for tests that tell a story."""

import hashlib
from array import array
from collections.abc import Iterable

from calls import encode

from kvharbor.pool import Acquired, BlockRun, Chain, ExtraKey, Invalidated, Pool, Shadow
from kvharbor.pool.steps import finish

NONE = BlockRun(array("I"), array("Q"))


def tokens(ids: Iterable[int], extra_keys: Iterable[ExtraKey] = (), salt: bytes = b"") -> Chain:
    """Whole blocks of an exact namespace."""
    return Chain(token_ids=encode(ids), extra_keys=tuple(extra_keys), salt=salt)


def keys(names: Iterable[object], before: Iterable[object] = ()) -> Chain:
    """Blocks of an opaque namespace, each by its name and those before it; of a chain behind others, with theirs."""
    known, found = list(before), []
    for name in names:
        known.append(name)
        found.append(hashlib.sha256(repr(known).encode()).digest())
    return Chain(keys=b"".join(found), scheme="test/sha256")


def acquire(
    pool: Pool,
    chain: Chain,
    table: int = 0,
    session: int = 1,
    *,
    computes: bool = False,
    unless_pending: bool = False,
) -> Acquired:
    return finish(pool.acquire(session, chain, table, computes=computes, unless_pending=unless_pending))


def abandon(pool: Pool, chain: Chain, session: int = 1) -> None:
    finish(pool.abandon(session, chain))


def lease(pool: Pool, count: int, session: int = 1) -> BlockRun:
    return finish(pool.lease(session, count, max(count, 1)))


def commit(pool: Pool, blocks: BlockRun, chain: Chain, parent: BlockRun = NONE, session: int = 1) -> list[Shadow]:
    return list(finish(pool.commit_blocks(session, parent, blocks, chain)))


def release(pool: Pool, blocks: BlockRun, session: int = 1) -> int:
    return finish(pool.release_blocks(session, blocks))


def invalidate(pool: Pool, block: BlockRun, session: int = 1) -> Invalidated:
    return finish(pool.invalidate(session, block.block_ids[0], block.generations[0]))


def part(run: BlockRun, first: int, end: int | None = None) -> BlockRun:
    return BlockRun(run.block_ids[first:end], run.generations[first:end])


def publish(pool: Pool, chain: Chain, count: int, session: int = 1) -> BlockRun:
    """Leases and commits the blocks of a chain."""
    blocks = lease(pool, count, session)
    assert commit(pool, blocks, chain, session=session) == []
    return blocks


def backwards(run: BlockRun) -> BlockRun:
    """Tail first, as an engine lets go."""
    return BlockRun(run.block_ids[::-1], run.generations[::-1])
