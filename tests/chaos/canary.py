"""A process that is never killed: what it has pinned and what it holds must outlive every death of the service.

It answers the harness one request at a time; whatever is not there any more comes back as a count of lost blocks.
"""

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from chaos.channel import Channel
from chaos.held import Fence, Held, WrongBytes
from chaos.load import PIN_NAMES
from chaos.stamps import BLOCK_TOKENS, LAYOUT
from chaos.universe import POOL, POOL_BYTES, VERSIONS, roots
from kvharbor.client import (
    BlocksStored,
    Full,
    Harbor,
    HarborError,
    PinNotFound,
    Pool,
    PoolStats,
    Progress,
    Sequence,
    Unavailable,
    connect,
)

_PREFIXES = {
    f"canary-{number}": list(range(900_000 + 1000 * number, 900_000 + 1000 * number + 3 * BLOCK_TOKENS))
    for number in range(2)
}
_LIVING_TOKENS = list(range(800_000, 800_000 + 2 * BLOCK_TOKENS + 5))
_MOST_LIVING_TOKENS = 4 * BLOCK_TOKENS
_DEADLINE_S = 20.0
_PAUSE_S = 0.01

T = TypeVar("T")
Answer = dict[str, Any]


class Canary:
    """Pinned prefixes and one sequence that lives on and on."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._fence = Fence()
        self._harbor: Harbor | None = None
        self._tenant = f"uid-{os.getuid()}"

    def plant(self) -> Answer:
        """Opens the pool, made if need be, pins the prefixes and begins a sequence. At the start and in a new epoch."""
        if self._harbor is not None:
            with contextlib.suppress(HarborError):
                self._harbor.close()
        self._harbor = connect(self._target, client_name="canary")
        self._pool: Pool = self._harbor.open_pool(POOL, LAYOUT, POOL_BYTES)
        for name, tokens in _PREFIXES.items():
            warm = self._pool.warmup(tokens, name)
            if warm.sequence is not None:
                self._held(warm.sequence, tokens).compute(self._pool, len(tokens))
                warm.sequence.release()
        self._living = self._begin()
        return {}

    def check(self) -> Answer:
        """Verifies that all of it is there, byte for byte."""
        lost = checked = 0
        for tokens in _PREFIXES.values():
            with self._pool.allocate(tokens, max_cached_tokens=len(tokens), wait_s=5.0) as sequence:
                lost += (len(tokens) - sequence.cached_tokens) // BLOCK_TOKENS
                checked += self._held(sequence, tokens).verify(self._pool)
        living = self._living.sequence
        lost += living.computed_tokens // BLOCK_TOKENS - self._committed_tokens() // BLOCK_TOKENS
        checked += self._living.verify(self._pool)
        if len(self._living.tokens) == _MOST_LIVING_TOKENS:
            living.release()
            self._living = self._begin()
        self._living.compute(self._pool, len(self._living.tokens) + 1, [700_000 + len(self._living.tokens)])
        return {"lost": lost, "checked": checked}

    def snapshot(self) -> Answer:
        """Returns the index, [(block, generation), ...] by digest: the same keys are in several namespaces.

        Without what is of weights that a session may leave at any time, by its death too, as that is freed then.
        """
        return {"index": self._index(roots(self._tenant, [""]))}

    def left_private(self) -> Answer:
        """Returns how many blocks there are of weights' versions that sessions had for themselves, and are gone."""
        named = roots(self._tenant, ["", *VERSIONS])
        deadline = time.monotonic() + _DEADLINE_S
        while (count := self._block_count() - sum(map(len, self._index(named).values()))) and (
            time.monotonic() < deadline
        ):
            time.sleep(_PAUSE_S)
        return {"count": count}

    def settle(self) -> Answer:
        """Lets the sequence go and returns the counts once nobody holds anything, or when it takes too long."""
        self._living.sequence.release()
        deadline = time.monotonic() + _DEADLINE_S
        while _anything_held(stats := self._pool.stats()) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        return _counts(stats)

    def clear(self) -> Answer:
        """Ends all pins, evicts everything and returns the counts: all must be free."""
        for name in (*_PREFIXES, *PIN_NAMES):
            with contextlib.suppress(PinNotFound):
                self._pool.unwarm(name)
        self._pool.evict_unheld()
        return _counts(self._pool.stats())

    def _block_count(self) -> int:
        stats = self._pool.stats()
        return stats.cached_block_count + stats.warm_block_count + stats.active_block_count

    def _index(self, known_roots: set[bytes]) -> dict[str, list[tuple[int, int]]]:
        """Returns what is below these roots."""
        index: dict[str, list[tuple[int, int]]] = {}
        known = {*known_roots}
        with contextlib.closing(self._pool.watch()) as watch:
            for event in watch:
                if isinstance(event, Progress):
                    break
                if isinstance(event, BlocksStored) and event.parent_digest in known:
                    known.update(event.digests)
                    for digest, *place in zip(event.digests, event.block_ids, event.generations, strict=True):
                        index.setdefault(digest.hex(), []).append((place[0], place[1]))
        return {digest: sorted(places) for digest, places in index.items()}

    def _committed_tokens(self) -> int:
        """Returns how many tokens of the living sequence the service has, once it says so itself."""
        living = self._living.sequence
        while (result := living.commit(living.computed_tokens)).pending:
            time.sleep(_PAUSE_S)
        return result.committed_tokens

    def _begin(self) -> Held:
        living = self._held(self._pool.allocate(_LIVING_TOKENS, max_cached_tokens=0, wait_s=5.0), _LIVING_TOKENS)
        living.compute(self._pool, len(_LIVING_TOKENS))
        return living

    def _held(self, sequence: Sequence, tokens: list[int]) -> Held:
        # Its harbor ends with the epoch, so there is no other.
        return Held(sequence, tokens, self._fence, epochs=0)


def _anything_held(stats: PoolStats) -> bool:
    return bool(
        stats.reserved_block_count or stats.active_block_count or stats.quarantined_block_count or stats.sequence_count
    )


def _counts(stats: PoolStats) -> Answer:
    return {
        "total": stats.total_block_count,
        "free": stats.free_block_count,
        "cached": stats.cached_block_count,
        "warm": stats.warm_block_count,
        "reserved": stats.reserved_block_count,
        "active": stats.active_block_count,
        "quarantined": stats.quarantined_block_count,
    }


def _patiently(action: Callable[[], T]) -> T:
    """Repeats what fails because the service is away, or has no room now."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        try:
            return action()
        except (Unavailable, Full):
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


def sing(end: socket.socket, target: str) -> None:
    """Runs a canary in this process."""
    channel = Channel(end)
    canary = Canary(target)
    with contextlib.suppress(EOFError):
        while (message := channel.receive(None)) is not None:
            try:
                channel.send("answer", **_patiently(getattr(canary, message["kind"])))
            except WrongBytes as wrong:
                channel.send("wrong", text=str(wrong))
            except Exception:
                channel.send("failed", text=traceback.format_exc())
