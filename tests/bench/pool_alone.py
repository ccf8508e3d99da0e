"""The pool without any service: match, allocate, commit and release of a cold prompt, in a pool that is full.

Full, as a pool in use is: every block that a prompt takes has to be evicted first.
"""

from array import array
from collections.abc import Callable

from bench.figures import Figure, interleaved, seconds
from kvharbor.pool import Commit, Pool, PoolConfig, Prompt
from kvharbor.pool.steps import finish

SESSION = 1
BURST_TOKENS = 65_536


class FullPool:
    """A pool filled with cached blocks, and fresh prompts for it."""

    def __init__(self, block_count: int, block_tokens: int, policy: str = "lru", *, history: bool = False) -> None:
        self._pool = Pool(PoolConfig(block_count, block_tokens, policy=policy, history=history))
        self._pool.open_session(SESSION, "bench")
        self._next_token = 0
        filled = 0
        while filled < block_count:
            part = min(512, block_count - filled)
            self.serve(self.fresh_prompt(part * block_tokens))
            filled += part

    def fresh_prompt(self, token_count: int) -> bytes:
        """Returns tokens that were never seen."""
        first = self._next_token
        self._next_token += token_count
        return array("I", range(first, first + token_count)).tobytes()

    def serve(self, token_ids: bytes) -> None:
        """Takes a prompt through its whole life."""
        pool = self._pool
        made = finish(pool.allocate(SESSION, Prompt(token_ids)))
        finish(pool.commit(SESSION, made.number, Commit(len(token_ids) // 4)))
        finish(pool.release(SESSION, made.number))
        pool.drain_events()

    def sample(self, token_count: int) -> Callable[[], float]:
        """Returns a sampler of the time a cold prompt takes, as the mean of some in a row.

        In a row, as a single prompt would measure how cold the processor's caches are after another sample.
        """

        def serve_all(prompts: list[bytes]) -> None:
            for prompt in prompts:
                self.serve(prompt)

        def take() -> float:
            prompts = [self.fresh_prompt(token_count) for _ in range(max(1, BURST_TOKENS // token_count))]
            return seconds(lambda: serve_all(prompts)) / len(prompts)

        return take


def measure(rounds: int) -> list[Figure]:
    """Measures `pool_us_*` and `pool_1m_blocks_over_1k`, with LRU where the name does not say auto."""
    coarse, fine = FullPool(4_096, 64), FullPool(16_384, 16)
    samples = {f"pool_us_{count}": coarse.sample(count) for count in (512, 2_048, 8_192, 131_072)}
    samples |= {f"pool_us_{count}_b16": fine.sample(count) for count in (512, 2_048, 8_192, 131_072)}
    samples["pool_us_2048_auto"] = FullPool(4_096, 64, policy="auto").sample(2_048)
    samples["pool_us_2048_history"] = FullPool(4_096, 64, history=True).sample(2_048)
    samples["1k"] = FullPool(1_000, 64).sample(2_048)
    samples["1m"] = FullPool(1_000_000, 64).sample(2_048)
    taken = interleaved(samples, rounds)
    figures = [
        Figure(name, value * 1e6, "us", 100.0 if name == "pool_us_2048" else None)
        for name, value in taken.items()
        if name.startswith("pool_us")
    ]
    return [*figures, Figure("pool_1m_blocks_over_1k", taken["1m"] / taken["1k"], "ratio", 1.2)]
