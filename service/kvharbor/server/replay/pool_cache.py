"""The real pool as what a trace is run through."""

from array import array

import numpy as np

from kvharbor.pool import Commit, Pool, PoolConfig, Prompt
from kvharbor.pool.errors import PoolExhausted
from kvharbor.pool.steps import finish
from kvharbor.server.traces.trace import Request

# A name is one full block, whatever its size in the trace: small ones cost least.
_BLOCK_TOKENS = 16
_SESSION = 1


class PoolCache:
    """A pool with one session, in this process. Each name stands for a fixed run of tokens of its own."""

    def __init__(self, block_count: int, policy: str) -> None:
        self._pool = Pool(PoolConfig(block_count, _BLOCK_TOKENS, policy=policy))
        self._pool.open_session(_SESSION, "replay")
        # The sequence of each request that runs.
        self._sequences: dict[int, int] = {}

    def admit(self, index: int, request: Request, output_block_count: int) -> int | None:
        """Allocates with room for the output, and commits the whole input."""
        pool = self._pool
        token_ids, reserve_tokens = _tokens(request.block_names), output_block_count * _BLOCK_TOKENS
        input_tokens = len(request.block_names) * _BLOCK_TOKENS
        if not token_ids:
            # A sequence has a token. It takes the place of one of the output's, and is never a block to share.
            token_ids, reserve_tokens = bytes(4), reserve_tokens - 1
        try:
            made = finish(
                pool.allocate(
                    _SESSION, Prompt(token_ids), reserve_tokens=reserve_tokens, max_cached_tokens=input_tokens
                )
            )
        except PoolExhausted:
            return None
        finish(pool.commit(_SESSION, made.number, Commit(input_tokens)))
        pool.drain_events()
        self._sequences[index] = made.number
        return made.cached_tokens // _BLOCK_TOKENS

    def release(self, index: int) -> None:
        """Releases the sequence."""
        finish(self._pool.release(_SESSION, self._sequences.pop(index)))

    @property
    def evicted_block_count(self) -> int:
        """The pool's own count."""
        return self._pool.stats().counters.evicted_block_count


def _tokens(names: "array[int]") -> bytes:
    first = np.frombuffer(names, dtype=np.uint32)[:, None] * np.uint32(_BLOCK_TOKENS)
    return (first + np.arange(_BLOCK_TOKENS, dtype=np.uint32)).astype("<u4", copy=False).tobytes()
