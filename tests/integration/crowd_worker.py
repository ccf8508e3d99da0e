"""Many sessions in one process: each asks for a prompt, computes what is not there, and verifies what is."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from integration.client_worker import LAYOUT, pool_size, read, stamp
from kvharbor.client import aio

STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Served:
    """How one session came to its prompt: tokens that were there, how long it waited, and whether it read its own."""

    cached_tokens: int
    waited_s: float
    is_right: bool


class Crowd:
    """So many sessions on one pool; made by a `WorkerProcess`."""

    session_count = 16

    def __init__(self, target: str, pool_name: str, block_count: int) -> None:
        self._runner = asyncio.Runner()
        self._harbors: list[aio.Harbor] = []
        self._pools: list[Any] = []
        self._runner.run(self._connect(target, pool_name, block_count))

    def ask(self, tokens: Sequence[int], pending_wait_s: float) -> list[Served]:
        """Has every session ask for the prompt at once; each behind it has a token of its own."""
        return self._runner.run(self._ask(tokens, pending_wait_s))

    def get_ready(self) -> None:
        """Returns once all sessions are there."""

    def close(self) -> None:
        """Ends the sessions."""
        self._runner.run(self._close())
        self._runner.close()

    async def _connect(self, target: str, pool_name: str, block_count: int) -> None:
        for _ in range(self.session_count):
            self._harbors.append(await aio.connect(target, client_name="crowd"))
            self._pools.append(await self._harbors[-1].open_pool(pool_name, LAYOUT, pool_size(block_count)))

    async def _close(self) -> None:
        for harbor in self._harbors:
            await harbor.close()

    async def _ask(self, tokens: Sequence[int], pending_wait_s: float) -> list[Served]:
        return list(await asyncio.gather(*(self._serve(pool, tokens, pending_wait_s) for pool in self._pools)))

    async def _answered(self) -> None:
        """Is what a session does between the answer and its work."""

    async def _serve(self, pool: Any, tokens: Sequence[int], pending_wait_s: float) -> Served:
        began_at = time.monotonic()
        held = await pool.allocate([*tokens, 1_000_000], pending_wait_s=pending_wait_s)
        waited_s = time.monotonic() - began_at
        await self._answered()
        cached_tokens = held.cached_tokens
        is_right = not cached_tokens or read(pool, held, 0, cached_tokens) == list(tokens[:cached_tokens])
        for first in range(cached_tokens, len(tokens), STEP_TOKENS):
            part = tokens[first : first + STEP_TOKENS]
            stamp(pool, held, first, part)
            await held.commit(first + len(part))
        await held.release()
        return Served(cached_tokens, waited_s, is_right)


class SmallCrowd(Crowd):
    """A few."""

    session_count = 4


class PoliteCrowd(SmallCrowd):
    """Those who compute nothing before all have an answer."""

    def __init__(self, target: str, pool_name: str, block_count: int) -> None:
        super().__init__(target, pool_name, block_count)
        self._all_answered = asyncio.Barrier(self.session_count)

    async def _answered(self) -> None:
        await self._all_answered.wait()
