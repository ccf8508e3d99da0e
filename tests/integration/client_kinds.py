"""Both clients behind one blocking face, so that a test's body says once what both must do."""

import asyncio
import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from integration.client_worker import LAYOUT, pool_size
from kvharbor.client import EpochEnded, Warm, WarmTask, aio, connect
from waiting import DEADLINE_S

KINDS = ("sync", "asyncio")
Connect = Callable[..., Any]
T = TypeVar("T")


@contextlib.contextmanager
def connector(kind: str) -> Iterator[Connect]:
    """Yields a blocking `connect`; closes the harbors that it made.

    Their calls have the time that tests have: the next process of a service may take long on a busy machine.
    """
    runner = asyncio.Runner()
    harbors: list[Any] = []

    def start(*args: Any, **options: Any) -> Any:
        options.setdefault("timeout_s", DEADLINE_S)
        harbor = (
            connect(*args, **options)
            if kind == "sync"
            else _Blocking(runner.run(aio.connect(*args, **options)), runner)
        )
        harbors.append(harbor)
        return harbor

    with runner:
        try:
            yield start
        finally:
            for harbor in harbors:
                harbor.close()


def after_epochs(call: Callable[[], T]) -> T:
    """Makes a call again that an epoch has ended under."""
    while True:
        with contextlib.suppress(EpochEnded):
            return call()


@pytest.fixture(params=KINDS)
def open_harbor(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects with the client under test."""
    with connector(request.param) as start:
        yield start


class _Blocking:
    """Runs the coroutines of an asyncio object to their end; everything else is the object's own."""

    def __init__(self, wrapped: Any, runner: asyncio.Runner) -> None:
        self.wrapped = wrapped
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.wrapped, name)
        if not inspect.ismethod(member):
            return member

        def call(*args: Any, **options: Any) -> Any:
            result = member(*_bare(args), **options)
            if inspect.iscoroutine(result):
                result = self._runner.run(result)
            return self._faced(result)

        return call

    def __iter__(self) -> Iterator[Any]:
        events = self.wrapped.__aiter__()
        while True:
            try:
                yield self._runner.run(anext(events))
            except StopAsyncIteration:
                return

    def __enter__(self) -> "_Blocking":
        self._runner.run(self.wrapped.__aenter__())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._runner.run(self.wrapped.__aexit__(*exc_info))

    def _faced(self, result: Any) -> Any:
        if isinstance(result, aio.Pool | aio.PoolHandle | aio.Recording | aio.Sequence | aio.Watch):
            return _Blocking(result, self._runner)
        if isinstance(result, Warm | WarmTask):
            return dataclasses.replace(result, sequence=self._faced(result.sequence))
        if isinstance(result, list):
            return [self._faced(item) for item in result]
        return result


def _bare(value: Any) -> Any:
    if isinstance(value, _Blocking):
        return value.wrapped
    if isinstance(value, tuple | list):
        return type(value)(_bare(item) for item in value)
    return value


@pytest.fixture
def harbor(open_harbor: Connect, target: str) -> Any:
    """A harbor of the client under test."""
    return open_harbor(target, client_name="test")


@pytest.fixture
def pool(harbor: Any, pool_name: str) -> Any:
    """A pool of 8 blocks of 16 tokens that no other test has."""
    return harbor.open_pool(pool_name, LAYOUT, pool_size(8))
