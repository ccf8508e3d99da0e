"""The way into the asyncio client: `async with connect()` and `await connect()` both work."""

from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from kvharbor.client import address
from kvharbor.client.aio.harbor import Harbor
from kvharbor.client.aio.link import Link
from kvharbor.client.aio.pool import Pool
from kvharbor.client.engines import Engine
from kvharbor.client.options import UNNAMED, Options

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


def connect(
    target: address.Target = None,
    *,
    client_name: str = "",
    engine: Engine = UNNAMED,
    timeout_s: float = 10.0,
    accepts_warm_tasks: bool = False,
    away_wait_s: float | None = None,
    on_epoch: Callable[[str, str], Any] | None = None,
    on_moved: Callable[[Pool], Any] | None = None,
    join: str = "",
    rank: int = 0,
    read_only: bool = False,
) -> Connecting[Harbor]:
    """Opens a session with the service at `target`, which lives until close or the end of this process.

    `await` it for a Harbor to close, or `async with` it for one that is closed at the end of the block.

    `target` is "unix:/path", a path (text with a "/", or a pathlib one) or "host:port"; None means the variable
    KVHARBOR_SOCKET, else /run/kvharbor/kvharbor.sock. Over TCP there is no session: lookup, stats and watch only.
    `client_name` and `engine`, what computes here, are shown to people. `timeout_s` is the deadline of this call and
    the default one of every later call. `accepts_warm_tasks` has the service tell of prefixes to compute for operators:
    see Harbor.next_warm_task.

    When the service's process ends, the harbor goes on with the next one [C11]; calls that need it wait for that,
    up to their timeout and to `away_wait_s`, if given (0: not at all). `on_epoch(old, new)` is called, and awaited if
    need be, when the service has lost its state. It returns
    when nothing is at work on the pools' memory any more; the harbor then opens them anew, in their place [C12].
    Without it such an end is the end of the harbor. `on_moved(pool)` is called in the same way before the first call on
    a pool whose memory has other addresses now, by that or by a `drop_pool` that was refused: what was taken from its
    views before is void [C15].

    `join` makes this process a member of the session whose leader's `Harbor.join_token` it is, under a `rank` of
    its own from 1 on: it maps what the leader has opened, `read_only` or not, and makes no calls [C13].

    Raises ServiceUnreachable at once when nobody listens there, or this process may not connect.
    """

    async def opened() -> Harbor:
        options = Options(
            client_name=client_name,
            engine=engine,
            timeout_s=timeout_s,
            accepts_warm_tasks=accepts_warm_tasks,
            away_wait_s=away_wait_s,
            on_epoch=on_epoch,
            on_moved=on_moved,
            join=join,
            rank=rank,
            read_only=read_only,
        )
        return Harbor(await Link.open(address.parse(target), options))

    return Connecting(opened())
