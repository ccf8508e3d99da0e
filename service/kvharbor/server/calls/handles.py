"""Handles of sequences: "epoch.pool.session.number" outside, the session's number inside."""

import re
from typing import TypeVar

from kvharbor.pool.errors import InvariantViolation, PoolError, SequenceNotFound
from kvharbor.pool.steps import Steps
from kvharbor.server.errors import StaleEpoch
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.served_pool import OpenedPool

T = TypeVar("T")


def number_in(sequence_id: str, opened: OpenedPool, pools: Pools) -> int:
    """Returns the number in a handle of this session and pool.

    Another session's handle is as unknown as one that never was, and every number has one spelling [S7].
    """
    number = sequence_id.removeprefix(opened.handle_prefix)
    if len(number) < len(sequence_id) and number.isascii() and number.isdigit() and len(number) <= 18:
        if number[0] != "0":
            return int(number)
    elif isinstance(stale := pools.unknown(".".join(sequence_id[:80].split(".")[:2])), StaleEpoch):
        raise stale
    raise SequenceNotFound(sequence_id=sequence_id[:80])


def named(opened: OpenedPool, steps: Steps[T]) -> Steps[T]:
    """Runs an operation whose refusal shall name its sequence by the handle."""
    try:
        return (yield from steps)
    except InvariantViolation:
        raise
    except PoolError as refused:
        raise with_handle(refused, opened) from None


def with_handle(refused: PoolError, opened: OpenedPool) -> PoolError:
    """Returns the refusal with the caller's handle: the pool knows a sequence as "session.number"."""
    own = refused.attributes.get("sequence_id")
    if own is None or not re.fullmatch(r"[0-9]+\.[0-9]+", str(own)):
        return refused
    return type(refused)(**{**refused.attributes, "sequence_id": f"{opened.served.pool_id}.{own}"})
