"""What a trace is run through."""

from typing import Protocol

from kvharbor.server.traces.trace import Request


class Cache(Protocol):
    """Memory for a number of blocks. Requests are known by their index; each fits into the empty memory."""

    def admit(self, index: int, request: Request, output_block_count: int, /) -> int | None:
        """Holds the leading run of blocks that is there and makes the rest, and as many more for the output.

        Returns the length of the run, or None, with nothing changed, as long as others hold too much.
        """
        ...

    def release(self, index: int, /) -> None:
        """Ends a request: its blocks stay as long as there is room, its output's do not."""
        ...

    @property
    def evicted_block_count(self) -> int:
        """Blocks that were given up for others."""
        ...
