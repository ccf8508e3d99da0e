"""The way into the synchronous client."""

from collections.abc import Callable
from typing import Any

from kvharbor.client import address
from kvharbor.client.engines import Engine
from kvharbor.client.harbor import Harbor
from kvharbor.client.link import Link
from kvharbor.client.options import UNNAMED, Options
from kvharbor.client.pool import Pool


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
) -> Harbor:
    """Opens a session with the service at `target`, which lives until close or the end of this process.

    `target` is "unix:/path", a path (text with a "/", or a pathlib one) or "host:port"; None means the variable
    KVHARBOR_SOCKET, else /run/kvharbor/kvharbor.sock. Over TCP there is no session: lookup, stats and watch only.
    `client_name` and `engine`, what computes here, are shown to people. `timeout_s` is the deadline of this call and
    the default one of every later call. `accepts_warm_tasks` has the service tell of prefixes to compute for operators:
    see Harbor.next_warm_task.

    When the service's process ends, the harbor goes on with the next one [C11]; calls that need it wait for that,
    up to their timeout and to `away_wait_s`, if given (0: not at all). `on_epoch(old, new)` is called in a
    thread of its own when the service has lost its state. It returns
    when nothing is at work on the pools' memory any more; the harbor then opens them anew, in their place [C12].
    Without it such an end is the end of the harbor. `on_moved(pool)` is called in the same way before the first call on
    a pool whose memory has other addresses now, by that or by a `drop_pool` that was refused: what was taken from its
    views before is void [C15].

    `join` makes this process a member of the session whose leader's `Harbor.join_token` it is, under a `rank` of
    its own from 1 on: it maps what the leader has opened, `read_only` or not, and makes no calls [C13].

    Raises ServiceUnreachable at once when nobody listens there, or this process may not connect.
    """
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
    return Harbor(Link(address.parse(target), options))
