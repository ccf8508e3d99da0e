"""The pool after its process has died: rebuilt from the ledger, without any service."""

from array import array
from collections.abc import Iterator

from bench.figures import Figure, interleaved, seconds
from kvharbor.pool import Commit, Ledger, Pool, PoolConfig, Prompt, ledger_bytes
from kvharbor.pool.steps import finish

BLOCK_COUNT = 100_000
PROMPT_BLOCKS = 250
SESSION = 1


def prompts(config: PoolConfig) -> Iterator[bytes]:
    """Yields prompts that fill a pool exactly."""
    size = PROMPT_BLOCKS * config.block_tokens
    for first in range(0, config.block_count * config.block_tokens, size):
        yield array("I", range(first, first + size)).tobytes()


def filled_ledger(config: PoolConfig) -> bytearray:
    """Returns the ledger that a pool full of committed blocks leaves, half of them held by a session."""
    buffer = bytearray(ledger_bytes(config))
    pool = Pool(config, Ledger.create(config, buffer))
    pool.open_session(SESSION, "bench")
    for index, token_ids in enumerate(prompts(config)):
        made = finish(pool.allocate(SESSION, Prompt(token_ids)))
        finish(pool.commit(SESSION, made.number, Commit(len(token_ids) // 4)))
        if index % 2:
            finish(pool.release(SESSION, made.number))
        pool.drain_events()
    return buffer


def recover(config: PoolConfig, buffer: bytearray) -> Pool:
    """Rebuilds the pool. Nothing in the ledger changes by that, so it can be done again."""
    sessions = {SESSION: "bench"}
    return Pool.recovered(config, Ledger.open(config, buffer), sessions, first_number=2, first_revision=1)


def measure(rounds: int) -> list[Figure]:
    """Measures `recover_100k_s`."""
    config = PoolConfig(BLOCK_COUNT, 64)
    buffer = filled_ledger(config)
    taken = interleaved({"recover": lambda: seconds(lambda: recover(config, buffer))}, rounds)
    return [Figure("recover_100k_s", taken["recover"], "s", 1.0)]
