"""A coroutine whose result may be entered at once: `async with connect()` and `await connect()` both work."""

from collections.abc import Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

EnteredT = TypeVar("EnteredT", bound=AbstractAsyncContextManager[Any])


class Connecting(Coroutine[Any, Any, EnteredT]):
    """The coroutine that it is made of, for one use: await it, make it a task, or enter it with `async with`.

    What comes of it must be an asynchronous context manager that gives itself.
    """

    def __init__(self, opening: Coroutine[Any, Any, EnteredT]) -> None:
        self._opening = opening

    def __await__(self) -> Generator[Any, Any, EnteredT]:
        return self._opening.__await__()

    def send(self, value: Any) -> Any:
        """Runs the coroutine on, for event loops."""
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        """Raises an error in the coroutine, for event loops."""
        return self._opening.throw(*error)

    def close(self) -> None:
        """Ends the coroutine, for event loops."""
        self._opening.close()

    async def __aenter__(self) -> EnteredT:
        self._opened = await self._opening
        await self._opened.__aenter__()
        return self._opened

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        return await self._opened.__aexit__(*exc_info)
