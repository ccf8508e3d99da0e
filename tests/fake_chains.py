"""Chains of known keys in a pool of a `FakeService`: asking for them, publishing them, and what is held then."""

from typing import Any

from fake_service import FakeService
from kvharbor.client import Acquired, BlockRun, Chain, CommitChain, Namespace, Pool
from waiting import until

SPACE = Namespace(scheme="test/sha256")
KEYS = [bytes([number]) * 32 for number in range(8)]


def chain(key_count: int, table_block_count: int = 0, **fields: Any) -> Chain:
    """Returns the chain of the first keys."""
    return Chain(keys=b"".join(KEYS[:key_count]), namespace=SPACE, table_block_count=table_block_count, **fields)


def published(pool: Pool, key_count: int) -> BlockRun:
    """Blocks that the session has leased and committed under the first keys."""
    leased = pool.blocks.lease(key_count, key_count).blocks
    pool.blocks.commit([CommitChain(blocks=leased, keys=b"".join(KEYS[:key_count]), namespace=SPACE)])
    return leased


def held(pool: Pool) -> set[tuple[int, int]]:
    """What the session holds, as the client knows it."""
    return {*pool.own_blocks.all()}


def polled(waiting: Acquired) -> Acquired:
    """Waits for what a chain that waits is granted."""
    assert waiting.grant is not None
    got = until(waiting.grant.poll)
    assert got is not None
    return got


def acquire_numbers(service: FakeService) -> list[int]:
    """The numbers of the acquires that have come so far."""
    return [each.number for each in service.blocks.requests if each.WhichOneof("call") == "acquire"]
