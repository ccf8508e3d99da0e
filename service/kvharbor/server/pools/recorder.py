"""What requests a pool gets, for whoever records a trace of them: sizes, times, and names of blocks; never tokens."""

import asyncio
import contextlib
import hashlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvharbor.pool import Acquired, BlockRun, Chain, Prompt, SequenceView
from kvharbor.pool.digest import OPAQUE_KEY_BYTES, join_fields
from kvharbor.pool.errors import PoolError
from kvharbor.pool.tree import extras_by_block
from kvharbor.server.errors import ServerError, WatcherTooSlow
from kvharbor.server.scheduling.owner import PoolOwner
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
        self._failure: ServerError | PoolError | None = None
        self._is_stopped = False
        self._changed = asyncio.Event()

    async def names_of(self, prompt: Prompt | Chain, tenant: str, block_tokens: int) -> bytes:
        """Returns a name for each whole block of a prompt, of all up to its end and of its namespace [S14].

        A chain of opaque keys is named by these.
        """
        so_far = hashlib.blake2b(key=self._secret, digest_size=NAME_BYTES)
        namespace = [tenant.encode(), prompt.version.encode(), prompt.adapter.encode(), prompt.salt]
        contents, size = prompt.token_ids, 4 * block_tokens
        if isinstance(prompt, Chain) and prompt.scheme:
            namespace.append(prompt.scheme.encode())
            contents, size = prompt.keys, OPAQUE_KEY_BYTES
        so_far.update(join_fields(*namespace))
        extras = extras_by_block(prompt.extra_keys, block_tokens)
        names = bytearray()
        for index in range(len(contents) // size):
            if index and not index % _SLICE_BLOCKS:
                await asyncio.sleep(0)
            so_far.update(join_fields(contents[index * size : (index + 1) * size], extras.get(index, b"")))
            names += so_far.copy().digest()
        return bytes(names)

    def add(self, ended: Ended) -> None:
        """Keeps a request for the reader, or cuts a reader off who is too slow [S9]."""
        if self._failure is not None or self._is_stopped:
            return
        self._ended.append(ended)
        self._kept_bytes += _REQUEST_BYTES + len(ended.block_names)
        self._changed.set()
        if self._kept_bytes > self._limit_bytes and len(self._ended) > 1:
            limit = format_size(self._limit_bytes)
            self.end_with(WatcherTooSlow(len(self._ended), limit=limit, what="requests", remedy="record again"))
            self._ended.clear()

    def end_with(self, reason: ServerError | PoolError) -> None:
        """Ends the stream with `reason`, after what is kept."""
        self._failure = reason
        self._changed.set()

    def stop(self) -> None:
        """Ends the stream at its reader's wish, after what is kept."""
        self._is_stopped = True
        self._changed.set()

    @property
    def is_over(self) -> bool:
        """Whether it was stopped and everything is taken."""
        return self._is_stopped and not self._ended and self._failure is None

    async def take(self, timeout_s: float) -> list[Ended]:
        """Returns what has ended since the last call, at most about a message of it; nothing if nothing did in time.

        Raises what has ended the recording.
        """
        if not (self._ended or self._failure or self._is_stopped):
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
        # What tells of a request that runs on acquired blocks, by session and the block that goes with it.
        self._own_blocks: dict[int, dict[int, Callable[[int], None]]] = {}

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
            if not self._recordings:
                self._own_blocks.clear()

    @property
    def is_on(self) -> bool:
        """Whether anybody records."""
        return bool(self._recordings)

    async def arrived(self, prompt: Prompt | Chain, tenant: str) -> Arrival:
        """Notes a request that comes in."""
        at, block_tokens = self._owner.clock(), self._owner.pool.config.block_tokens
        names = [(one, await one.names_of(prompt, tenant, block_tokens)) for one in list(self._recordings)]
        input_tokens = len(prompt.token_ids) // 4
        if isinstance(prompt, Chain):
            input_tokens += len(prompt.keys) // OPAQUE_KEY_BYTES * block_tokens  # it has one of the two
        return Arrival(at, input_tokens, tuple(names))

    def admitted(self, arrival: Arrival, view: SequenceView) -> None:
        """The request runs: it is told of when its sequence ends, wherever that is by then. A repetition is not."""
        self._owner.pool.tell_end(view.session, view.number, self._teller(arrival))

    def acquired(self, arrival: Arrival, session: int, acquired: Acquired) -> None:
        """The request runs on blocks of its session's own: it is told of when the one goes that comes behind its chain.

        That is where its own tokens begin, so an engine gives it back with the request: neither before, as what it has
        leased ahead, nor later, as what other requests share. If that block is not among those leased here, it is the
        last one of these; a request for which nothing was leased is told of at once. What comes out nobody tells.
        """
        tell = self._teller(arrival)
        if not len(acquired.leased):
            tell(0)
            return
        chain_blocks = arrival.input_tokens // self._owner.pool.config.block_tokens
        place = min(chain_blocks - len(acquired.held), len(acquired.leased) - 1)
        block, own_blocks = acquired.leased.block_ids[place], self._own_blocks.setdefault(session, {})
        if block in own_blocks:
            own_blocks.pop(block)(0)
        own_blocks[block] = tell

    def released(self, session: int, blocks: BlockRun, *, are_told: bool = True) -> None:
        """A session has given blocks back, or was never told of them: then there was no request either."""
        own_blocks = self._own_blocks.get(session)
        if own_blocks:
            for block in own_blocks.keys() & set(blocks.block_ids):
                tell = own_blocks.pop(block)
                if are_told:
                    tell(0)

    def session_ended(self, session: int) -> None:
        """A session is gone with all that ran in it."""
        for tell in self._own_blocks.pop(session, {}).values():
            tell(0)

    def _teller(self, arrival: Arrival) -> Callable[[int], None]:
        clock = self._owner.clock
        admitted_at = clock()

        def tell(token_count: int) -> None:
            duration_s = clock() - admitted_at
            output_tokens = max(token_count - arrival.input_tokens, 0)
            for recording, names in arrival.names:
                arrival_s = arrival.at - recording.began_at
                recording.add(Ended(arrival_s, arrival.input_tokens, output_tokens, duration_s, names))

        return tell

    def end_with(self, reason: ServerError) -> None:
        """Ends every recording with `reason`, those to come too."""
        self._failure = reason
        for recording in self._recordings:
            recording.end_with(reason)
