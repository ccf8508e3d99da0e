"""Worker processes for tests: real clients in processes of their own, told what to do over a pipe.

Every token's KV is stamped with one number, the same in all planes, layers, heads and elements, so that what is
read shows whose bytes they are and whether a part of a block is somebody else's.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvharbor.client import Pool, connect
from kvharbor.client import Sequence as PoolSequence
from kvharbor.gpumem import DataType, Layout

BLOCK_TOKENS = 16
LAYOUT = Layout.attention("stamps@1", 2, 2, 4, DataType.FLOAT32, block_tokens=BLOCK_TOKENS)
_ANSWER_DEADLINE_S = 30.0


def pool_size(block_count: int) -> int:
    """Bytes of a pool with so many usable blocks."""
    return (block_count + LAYOUT.scratch_blocks) * LAYOUT.block_bytes


def stamp(pool: Pool, sequence: PoolSequence, first_token: int, stamps: Sequence[float]) -> None:
    """Writes one number a token, from first_token on."""
    slots = sequence.slots(first_token, first_token + len(stamps))
    for plane in LAYOUT.planes:
        for layer in range(plane.layer_count):
            pool.views.numpy(plane.name, layer)[slots] = np.asarray(stamps)[:, None, None]


def read(pool: Pool, sequence: PoolSequence, first_token: int, end_token: int) -> list[float]:
    """Reads one number a token; tokens whose planes, layers or elements differ read as NaN."""
    slots = sequence.slots(first_token, end_token)
    pages = [
        pool.views.numpy(plane.name, layer)[slots].reshape(end_token - first_token, -1)
        for plane in LAYOUT.planes
        for layer in range(plane.layer_count)
    ]
    values = np.concatenate(pages, axis=1)
    same = (values == values[:, :1]).all(axis=1)
    return [float(value) for value in np.where(same, values[:, 0], np.nan)]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sequence as its worker sees it."""

    id: str
    table: list[int]
    cached_tokens: int
    computed_tokens: int
    token_count: int
    capacity_tokens: int


class Worker:
    """What a worker process can be told. Sequences are known by names that the test gives them."""

    def __init__(self, target: str, pool_name: str, block_count: int, **options: Any) -> None:
        self.harbor = connect(target, client_name=f"worker-{os.getpid()}", accepts_warm_tasks=True, **options)
        self.pool = self.harbor.open_pool(pool_name, LAYOUT, pool_size(block_count))
        self.sequences: dict[str, PoolSequence] = {}

    def allocate(self, name: str, tokens: Sequence[int], **options: Any) -> Snapshot:
        """Allocates under a name."""
        self.sequences[name] = self.pool.allocate(tokens, **options)
        return self.snapshot(name)

    def adopt(self, name: str, handoff_token: str) -> Snapshot:
        """Adopts under a name."""
        self.sequences[name] = self.pool.adopt(handoff_token)
        return self.snapshot(name)

    def fork(self, name: str, children: Sequence[str], **options: Any) -> list[Snapshot]:
        """Forks into as many children as there are names."""
        forked = self.sequences[name].fork(len(children), **options)
        self.sequences.update(zip(children, forked, strict=True))
        return [self.snapshot(child) for child in children]

    def stamp(self, name: str, first_token: int, stamps: Sequence[float]) -> None:
        """Writes."""
        self.write_stamps(self.sequences[name], first_token, stamps)

    def write_stamps(self, sequence: PoolSequence, first_token: int, stamps: Sequence[float]) -> None:
        """Writes where the pool's memory is the host's."""
        stamp(self.pool, sequence, first_token, stamps)

    def read(self, name: str, first_token: int, end_token: int) -> list[float]:
        """Reads."""
        return read(self.pool, self.sequences[name], first_token, end_token)

    def extend(self, name: str, token_count: int) -> Snapshot:
        """Extends."""
        self.sequences[name].extend(token_count)
        return self.snapshot(name)

    def commit(self, name: str, computed_tokens: int, new_tokens: Sequence[int] = ()) -> int:
        """Commits; returns committed_tokens."""
        return self.sequences[name].commit(computed_tokens, new_tokens).committed_tokens

    def switch_shadows(self, name: str) -> Snapshot:
        """Switches, and reports it with a commit of nothing new."""
        self.sequences[name].switch_shadows()
        self.sequences[name].commit(self.sequences[name].computed_tokens)
        return self.snapshot(name)

    def handoff(self, name: str, computed_tokens: int, new_tokens: Sequence[int] = ()) -> str:
        """Hands off; returns the token."""
        return self.sequences.pop(name).handoff(computed_tokens, new_tokens)

    def release(self, name: str) -> None:
        """Releases."""
        self.sequences.pop(name).release()

    def snapshot(self, name: str) -> Snapshot:
        """Describes a sequence."""
        held = self.sequences[name]
        return Snapshot(
            held.id,
            held.table.tolist(),
            held.cached_tokens,
            held.computed_tokens,
            held.token_count,
            held.capacity_tokens,
        )

    def claim(self, name: str, timeout_s: float) -> Snapshot | None:
        """Waits for a warm task and keeps its sequence under a name."""
        task = self.harbor.next_warm_task(timeout_s)
        if task is None:
            return None
        self.sequences[name] = task.sequence
        return self.snapshot(name)

    def close(self) -> None:
        """Ends the session."""
        self.harbor.close()

    def put(self, tokens: Sequence[int], stamps: Sequence[float]) -> None:
        """Allocates, writes what is missing, commits and releases a prompt."""
        with self.pool.allocate(tokens) as held:
            self.write_stamps(held, held.cached_tokens, stamps[held.cached_tokens :])
            held.commit(len(tokens))


class WorkerProcess:
    """A Worker in a process of its own, or what `make` makes; calls go to it by name and its errors come back."""

    def __init__(
        self, target: str, pool_name: str, block_count: int, make: Callable[[str, str, int], Any] = Worker
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, make, target, pool_name, block_count)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, operation: str, *args: Any, **options: Any) -> None:
        """Sends a call, for `answer` to wait for."""
        self._pipe.send((operation, args, options))

    def __getattr__(self, operation: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.begin(operation, *args, **options)
            return self.answer()

        return call

    def answer(self) -> Any:
        """Waits for the answer to what was sent last, and raises it if it is an error."""
        if not self._pipe.poll(_ANSWER_DEADLINE_S):
            raise TimeoutError(f"no answer from worker {self.process.pid} in {_ANSWER_DEADLINE_S} s")
        value = self._pipe.recv()
        if isinstance(value, BaseException):
            raise value
        return value

    def kill(self) -> None:
        """Kills the process with SIGKILL and waits for its end."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self._pipe.close()

    def end(self) -> None:
        """Lets the process close its harbor and end."""
        with contextlib.suppress(OSError):
            self._pipe.close()
        self.process.join()


def serve_member(pipe: Connection, target: str, join_token: str, pool_id: str) -> None:
    """Joins a session, stamps all of its pool's first layer of K with 5, says whose it is, and waits for a word."""
    with connect(target, join=join_token, rank=1) as harbor:
        harbor.attach_pool(pool_id).views.numpy("k", 0)[...] = 5.0
        pipe.send(harbor.session_id)
        pipe.recv()


def _serve(
    pipe: Connection, make: Callable[[str, str, int], Any], target: str, pool_name: str, block_count: int
) -> None:
    worker = make(target, pool_name, block_count)
    with contextlib.closing(worker), contextlib.suppress(EOFError):
        for operation, args, options in _requests(pipe):
            try:
                pipe.send(getattr(worker, operation)(*args, **options))
            except Exception as failure:  # every error is the test's to judge
                pipe.send(failure)


def _requests(pipe: Connection) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    while True:
        yield pipe.recv()
