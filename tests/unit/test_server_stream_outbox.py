"""What a stream has still to send: bounded, in order, and taken back if it has not left."""

import asyncio

import pytest

from kvharbor.server.errors import WatcherTooSlow
from kvharbor.server.stream.outbox import MAX_UNSENT, MAX_UNSENT_BYTES, Outbox
from kvharbor.v1 import blocks_pb2, types_pb2
from kvharbor.v1 import stream_service_pb2 as pb
from scenarios import run, settled
from stream_channel import Channel, response


def test_what_has_still_to_be_sent_is_bounded() -> None:
    """In number and in bytes; what does not fit is taken back by who is told so."""
    outbox, undone = Outbox(), list[int]()
    for number in range(1, MAX_UNSENT + 1):
        outbox.put(response(number))
    with pytest.raises(WatcherTooSlow):
        outbox.put(response(MAX_UNSENT + 1), lambda: undone.append(1))
    assert undone == [1]
    outbox = Outbox()
    table = types_pb2.BlockTable(block_ids=bytes(2**20))
    large = pb.ConverseResponse(number=1, lease=blocks_pb2.LeaseResponse(leased=table))
    for _ in range(MAX_UNSENT_BYTES // 2**20):
        outbox.put(large)
    with pytest.raises(WatcherTooSlow):
        outbox.put(response(2))


def test_what_was_sent_makes_room() -> None:
    """A client that reads is never cut off, however much it asks."""

    async def scenario() -> None:
        outbox, channel = Outbox(), Channel()
        sending = asyncio.create_task(outbox.send_all(channel.write))
        for number in range(1, 3 * MAX_UNSENT):
            outbox.put(response(number))
            await asyncio.sleep(0)
        outbox.close()
        await sending
        assert [one.number for one in channel.taken] == list(range(1, 3 * MAX_UNSENT))

    run(scenario)


def test_a_recall_that_has_not_left_is_made_the_new_one() -> None:
    """There is one a pool, so they need no bound; they are in line with the responses."""

    async def scenario() -> None:
        outbox, channel = Outbox(), Channel(reads=False)
        sending = asyncio.create_task(outbox.send_all(channel.write))
        outbox.put(response(1))
        await settled()
        outbox.put_recall("p", 1)
        outbox.put(response(2))
        outbox.put_recall("q", 5)
        outbox.put_recall("p", 7)
        channel.reads.set()
        await settled()
        outbox.put_recall("p", 9)
        outbox.close()
        await sending
        seen = [one.number or (one.recall.pool_id, one.recall.block_count) for one in channel.taken]
        assert seen == [1, ("p", 7), 2, ("q", 5), ("p", 9)]

    run(scenario)


def test_what_has_not_left_is_taken_back() -> None:
    """The last first; what was handed to the transport may have arrived."""

    async def scenario() -> None:
        outbox, channel, undone = Outbox(), Channel(reads=False), list[int]()
        sending = asyncio.create_task(outbox.send_all(channel.write))
        for number in (1, 2, 3):
            outbox.put(response(number), lambda number=number: undone.append(number))  # type: ignore[misc]
        await settled()
        sending.cancel()
        outbox.undo_all()
        assert undone == [3, 2]

    run(scenario)
