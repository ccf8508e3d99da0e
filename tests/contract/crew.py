"""Peers that are used again: starting one takes longer than most tests."""

import contextlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

from contract.peer import Peer


class Crew:
    """Other processes, idle between tests, each with nothing left of what a test had it do."""

    def __init__(self, environment: Mapping[str, str], *, finds_leaks: bool) -> None:
        self._environment = environment
        self._finds_leaks = finds_leaks
        self._idle: list[Peer] = []

    def fill(self, count: int) -> None:
        """Starts peers until so many are idle."""
        while len(self._idle) < count:
            self._idle.append(Peer.spawned(self._environment))

    @contextlib.contextmanager
    def one(self) -> Iterator[Peer]:
        """Lends an idle peer to a test, which may kill it; fails if the peer has something left after the test."""
        peer = self._idle.pop()
        yield peer
        if peer.process.poll() is not None:
            peer.__exit__(None, None, None)
            return
        self._idle.append(peer)
        left = peer.ask("reset")
        assert not self._finds_leaks or left == (0, {})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for peer in self._idle:
            peer.__exit__(exc_type, exc, traceback)
