"""What requests a pool gets, for whoever records a trace of them: sizes, times, and names of blocks; never tokens."""

import asyncio
import contextlib
import hashlib
import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvharbor.pool import Prompt, SequenceView
from kvharbor.pool.digest import join_fields
from kvharbor.pool.tree import extras_by_block
from kvharbor.server.errors import ServerError, WatcherTooSlow
from kvharbor.server.owner import PoolOwner
from kvharbor.server.sizes import format_size

NAME_BYTES: Final = 8
"""Two of a million blocks have the same name once in thirty million recordings."""
_SLICE_BLOCKS: Final = 2048
_MESSAGE_BYTES: Final = 256 * 1024
# What a request takes beside the names of its blocks, about.
_REQUEST_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that is over. Times are seconds; `arrival_s` is from the begin of the recording."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    duration_s: float
    block_names: bytes


class Recording:
    """One stream of what ends in a pool, in order of the ends; what is not read is kept up to `limit_bytes`.

    Its secret is its own and is forgotten with it: nobody can test whether a text was asked for, and the names of two
    recordings have nothing in common.
    """

    def __init__(self, began_at: float, limit_bytes: int) -> None:
        self.began_at = began_at
        self._limit_bytes = limit_bytes
        self._secret = secrets.token_bytes(32)
        self._ended: deque[Ended] = deque()
        self._kept_bytes = 0
        self._failure: ServerError | None = None
        self._changed = asyncio.Event()

    async def names_of(self, prompt: Prompt, tenant: str, block_tokens: int) -> bytes:
        """Returns a name for each whole block of a prompt, of all up to its end and of its namespace [S14]."""
        so_far = hashlib.blake2b(key=self._secret, digest_size=NAME_BYTES)
        so_far.update(join_fields(tenant.encode(), prompt.version.encode(), prompt.adapter.encode(), prompt.salt))
        extras = extras_by_block(prompt.extra_keys, block_tokens)
        block_bytes = 4 * block_tokens
        names = bytearray()
        for index in range(len(prompt.token_ids) // block_bytes):
            if index and not index % _SLICE_BLOCKS:
                await asyncio.sleep(0)
            tokens = prompt.token_ids[index * block_bytes : (index + 1) * block_bytes]
            so_far.update(join_fields(tokens, extras.get(index, b"")))
            names += so_far.copy().digest()
        return bytes(names)

    def add(self, ended: Ended) -> None:
        """Keeps a request for the reader, or cuts a reader off who is too slow [S9]."""
        if self._failure is not None:
            return
        self._ended.append(ended)
        self._kept_bytes += _REQUEST_BYTES + len(ended.block_names)
        self._changed.set()
        if self._kept_bytes > self._limit_bytes and len(self._ended) > 1:
            limit = format_size(self._limit_bytes)
            self.end_with(WatcherTooSlow(len(self._ended), limit=limit, what="requests", remedy="record again"))
            self._ended.clear()

    def end_with(self, reason: ServerError) -> None:
        """Ends the stream with `reason`, after what is kept."""
        self._failure = reason
        self._changed.set()

    async def take(self, timeout_s: float) -> list[Ended]:
        """Returns what has ended since the last call, at most about a message of it; nothing if nothing did in time.

        Raises what has ended the recording.
        """
        if not self._ended and self._failure is None:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        taken: list[Ended] = []
        size_bytes = 0
        while self._ended and size_bytes < _MESSAGE_BYTES:
            taken.append(self._ended.popleft())
            size_bytes += _REQUEST_BYTES + len(taken[-1].block_names)
        self._kept_bytes -= size_bytes
        if not taken and self._failure is not None:
            raise self._failure
        return taken


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has come in while somebody recorded, and the names of its blocks in each recording."""

    at: float
    input_tokens: int
    names: tuple[tuple[Recording, bytes], ...]


class Recorder:
    """The recordings of one pool that are under way."""

    def __init__(self, owner: PoolOwner, limit_bytes: int) -> None:
        self._owner = owner
        self._limit_bytes = limit_bytes
        self._recordings: list[Recording] = []
        self._failure: ServerError | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recording]:
        """Records, while the context lasts, what comes in; raises what has ended the pool."""
        if self._failure is not None:
            raise self._failure
        recording = Recording(self._owner.clock(), self._limit_bytes)
        self._recordings.append(recording)
        try:
            yield recording
        finally:
            self._recordings.remove(recording)

    @property
    def is_on(self) -> bool:
        """Whether anybody records."""
        return bool(self._recordings)

    async def arrived(self, prompt: Prompt, tenant: str) -> Arrival:
        """Notes a request that comes in."""
        at, block_tokens = self._owner.clock(), self._owner.pool.config.block_tokens
        names = [(one, await one.names_of(prompt, tenant, block_tokens)) for one in list(self._recordings)]
        return Arrival(at, len(prompt.token_ids) // 4, tuple(names))

    def admitted(self, arrival: Arrival, view: SequenceView) -> None:
        """The request runs: it is told of when its sequence ends, wherever that is by then. A repetition is not."""
        clock = self._owner.clock
        admitted_at = clock()

        def tell(token_count: int) -> None:
            duration_s = clock() - admitted_at
            output_tokens = max(token_count - arrival.input_tokens, 0)
            for recording, names in arrival.names:
                arrival_s = arrival.at - recording.began_at
                recording.add(Ended(arrival_s, arrival.input_tokens, output_tokens, duration_s, names))

        self._owner.pool.tell_end(view.session, view.number, tell)

    def end_with(self, reason: ServerError) -> None:
        """Ends every recording with `reason`, those to come too."""
        self._failure = reason
        for recording in self._recordings:
            recording.end_with(reason)
