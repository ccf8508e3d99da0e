"""Batches: one turn of the session for all items, one outcome an item."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvharbor.pool import validate
from kvharbor.pool.errors import InvariantViolation, PoolError
from kvharbor.pool.steps import Steps
from kvharbor.server.calls.handles import with_handle
from kvharbor.server.errors import ServerError
from kvharbor.server.messages.status import item_status
from kvharbor.server.pools.served_pool import OpenedPool
from kvharbor.v1 import types_pb2

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_ITEMS = 8192
"""Items of a batch: so that the reply fits in a message even if each is refused."""

# Between so many items of a batch others are served.
_ITEMS_A_SLICE = 16


def each(
    opened: OpenedPool,
    field: str,
    items: Sequence[Item],
    operate: Callable[[Item], Steps[Result]],
    refusal: Callable[[types_pb2.ItemStatus], Result],
) -> Steps[list[Result]]:
    """Operates on every item in order; one that is refused fails alone. Raises InvalidField if there are too many."""
    validate.listed(field, len(items), MAX_ITEMS)
    results: list[Result] = []
    for position, item in enumerate(items, start=1):
        try:
            results.append((yield from operate(item)))
        except InvariantViolation:
            raise
        except PoolError as refused:
            results.append(refusal(item_status(with_handle(refused, opened))))
        except ServerError as refused:
            results.append(refusal(item_status(refused)))
        if not position % _ITEMS_A_SLICE:
            yield
    return results
