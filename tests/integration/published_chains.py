"""Chains of keys as engines make them, which sessions of a real service ask for, publish and release."""

import hashlib
import itertools

from integration.client_worker import LAYOUT, pool_size
from kvharbor.client import Acquired, BlockRun, Chain, CommitChain, Harbor, Namespace, Pool

SPACE = Namespace(scheme="test/sha256")
NAMES = itertools.count()


def both(harbors: list[Harbor], block_count: int) -> list[Pool]:
    """A pool of their own, as each has it."""
    name = f"blocks-{next(NAMES)}"
    return [each.open_pool(name, LAYOUT, pool_size(block_count)) for each in harbors]


def keys(text: str, count: int) -> list[bytes]:
    """Chained keys as an engine makes them."""
    made = [b""]
    for index in range(count):
        made.append(hashlib.sha256(made[-1] + f"{text} {index}".encode()).digest())
    return made[1:]


def admit(pool: Pool, named: list[bytes], table_block_count: int, **how: float) -> Acquired:
    """Acquires a prompt, writes and publishes what is missing of it."""
    chain = Chain(keys=b"".join(named), namespace=SPACE, table_block_count=table_block_count, computes=True)
    (got,) = pool.blocks.acquire([chain], **how)
    publish(pool, named, got)
    return got


def publish(pool: Pool, named: list[bytes], got: Acquired) -> None:
    """Writes and publishes what is missing of a prompt."""
    missing = named[len(got.held) :]
    if got.refusal is None and missing:
        for block, key in zip(got.leased.block_ids[: len(missing)].tolist(), missing, strict=True):
            pool.views.numpy("k", 0)[block] = key[0]
        pool.blocks.commit(
            [
                CommitChain(
                    parent=got.held[-1:], blocks=got.leased[: len(missing)], keys=b"".join(missing), namespace=SPACE
                )
            ]
        )


def release(pool: Pool, got: Acquired) -> None:
    """Gives back all that was acquired, its end first."""
    pool.blocks.release(BlockRun.join([got.held, got.leased])[::-1])
