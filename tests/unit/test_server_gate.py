"""How a stream's call ends when its caller leaves in the same moment."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvharbor.server.calls.gate import Context, Gate, conversing


class Left:
    """A call whose caller has left: gRPC takes no status for it any more."""

    def __init__(self) -> None:
        self.codes: list[grpc.StatusCode] = []

    def set_trailing_metadata(self, _metadata: Any) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, _details: str) -> None:
        self.codes.append(code)
        raise grpc.aio.InternalError("the status could not be sent")


class Ending:
    """A servicer that ends its streams by itself."""

    def __init__(self) -> None:
        self.gate = Gate("epoch")
        self.gate.open()

    @conversing
    async def converse(self, _requests: AsyncIterator[Any], context: Context) -> None:
        await context.abort(grpc.StatusCode.CANCELLED, "another one has taken this one's place")


def test_a_status_that_nobody_is_left_to_take_is_no_failure_of_the_service() -> None:
    """It would be logged as one, with a traceback, and gRPC refuses a second status."""
    left = Left()
    with pytest.raises(grpc.aio.InternalError):
        asyncio.run(Ending().converse(None, left))  # type: ignore[arg-type]
    assert left.codes == [grpc.StatusCode.CANCELLED]
