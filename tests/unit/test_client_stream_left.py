"""A stream that was opened when the service's process had ended, and nobody had seen it yet [C17]."""

import queue
from collections.abc import Iterator

import pytest

from fake_chains import SPACE
from fake_process import refused_item
from fake_service import DEADLINE_S, FakeService
from kvharbor.client import CommitChain, Pool
from kvharbor.v1 import stream_service_pb2 as stream_pb2
from waiting import until


class NextProcess:
    """A call that the next process has taken: it refuses everything, as it has still to be told what is held."""

    def __init__(self, requests: Iterator[stream_pb2.ConverseRequest]) -> None:
        self._requests = requests
        self.refused = queue.Queue[int]()

    def __iter__(self) -> Iterator[stream_pb2.ConverseResponse]:
        for request in self._requests:
            self.refused.put(request.number)
            refusal = refused_item("RESUME_REQUIRED", 9)
            yield stream_pb2.ConverseResponse(number=request.number, refusal=refusal)

    def cancel(self) -> None:
        """Is not needed: the requests end."""


def test_what_a_process_refuses_before_it_knows_what_is_held_is_sent_again(
    service: FakeService, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a refusal says that there is another process, and nothing of the request."""
    leased = pool.blocks.lease(1, 1).blocks
    calls: list[NextProcess] = []

    def converse(requests: Iterator[stream_pb2.ConverseRequest]) -> NextProcess:
        calls.append(NextProcess(requests))
        return calls[-1]

    with monkeypatch.context() as patched:
        patched.setattr(pool.link, "converse", converse)
        service.blocks.break_off()
        pool.blocks.commit([CommitChain(blocks=leased, keys=bytes(32), namespace=SPACE)])
        until(lambda: bool(calls))
        calls[0].refused.get(timeout=DEADLINE_S)
    service.restart()
    service.wait_until_resumed()
    pool.blocks.flush()
    assert [*service.blocks.content.values()] == [*leased]
