"""A pool's index and its changes, as a stream of events."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc

from kvharbor.client import answers
from kvharbor.client.results import Progress, WatchEvent

if TYPE_CHECKING:
    from kvharbor.client.link import Link


class Watch:
    """A stream of events; iterate it, and close it (or leave its `with`) when done.

    `revision` is the last one that is complete: a later watch may start from it.
    """

    def __init__(self, stream: Any, link: "Link", revision: int) -> None:
        self._stream = stream
        self._link = link
        self._closed = False
        self.revision = revision

    def __iter__(self) -> Iterator[WatchEvent]:
        """Yields events until the watch is closed; raises the HarborError that ends it otherwise."""
        try:
            for reply in self._stream:
                for event in answers.watch_events(reply):
                    if isinstance(event, Progress):
                        self.revision = event.revision
                    yield event
        except grpc.RpcError as failure:
            if not self._closed:
                raise self._link.error(failure, None) from None

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stream, also for a thread that waits in it."""
        self._closed = True
        self._stream.cancel()
