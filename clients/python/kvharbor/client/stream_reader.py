"""The thread that reads a stream, and what it calls of the engine's."""

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from kvharbor.client.errors import ServiceBug

if TYPE_CHECKING:
    from kvharbor.client.stream import Stream

_LOG = logging.getLogger(__name__)


def read(reference: "weakref.ref[Stream]", call: Any) -> None:
    """Runs in the thread until the call ends, and keeps nothing alive that its owner has forgotten."""
    failure: grpc.RpcError | None = None
    try:
        for response in call:
            stream = reference()
            if stream is None or not stream.take(call, response):
                call.cancel()
                return
            del stream
    except grpc.RpcError as ended:
        failure = ended
    except Exception as bug:  # calls must not wait for ever
        _LOG.exception("an answer could not be taken in")
        if (stream := reference()) is not None:
            stream.fail(call, ServiceBug(f"an answer could not be taken in: {bug!r}"))
        return
    if (stream := reference()) is not None:
        stream.fail(call, stream.error(failure))


def tell(callback: Callable[[], object]) -> None:
    """Calls something of the engine's: what it raises is logged, and must not end the stream."""
    try:
        callback()
    except Exception:
        _LOG.exception("a callback has failed")
