"""A stream from the inside: what it has still to send, what is answered later, and its ends."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from kvharbor.pool.errors import InvalidField, PoolExhausted
from kvharbor.server.applications import Patience
from kvharbor.server.errors import Draining, WatcherTooSlow
from kvharbor.server.gate import Gate
from kvharbor.server.peer import Peer
from kvharbor.server.session import Session, State
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.stream.conversation import Conversation, Replaced
from kvharbor.server.stream.outbox import MAX_UNSENT, MAX_UNSENT_BYTES, Outbox
from kvharbor.server.stream.waits import MAX_WAITS, Waits
from kvharbor.v1 import blocks_pb2, types_pb2
from kvharbor.v1 import stream_service_pb2 as pb

DEADLINE_S = 10.0


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Runs a scenario with a deadline."""

    async def limited() -> None:
        await asyncio.wait_for(scenario(), DEADLINE_S)

    asyncio.run(limited())


async def settled() -> None:
    """Lets everything run that can run now."""
    for _ in range(50):
        await asyncio.sleep(0)


def response(number: int) -> pb.ConverseResponse:
    """Returns some response."""
    return pb.ConverseResponse(number=number, lease=blocks_pb2.LeaseResponse(waiting=True))


class Channel:
    """The other side: requests that it has sent, and responses that it takes as long as it `reads`."""

    def __init__(self, *requests: pb.ConverseRequest, reads: bool = True) -> None:
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        for request in requests:
            self.requests.put_nowait(request)
        self.taken: list[pb.ConverseResponse] = []
        self.reads = asyncio.Event()
        if reads:
            self.reads.set()

    async def read(self) -> Any:
        return await self.requests.get()

    async def write(self, message: Any) -> None:
        await self.reads.wait()
        self.taken.append(message)


class Bench:
    """A conversation whose leases are answered when the test lets them."""

    def __init__(self) -> None:
        self.session = Session(1, "token", Peer(1, 1, "t", administrator=False), "test", "0")
        self.gate = Gate("0123456789ab")
        self.gate.open()
        self.conversation = Conversation(self.session, self.gate)
        self.conversation.responding = {"lease": self._lease}
        self.may_answer = asyncio.Event()
        self.served: list[int] = []

    async def _lease(self, number: int, _request: Any) -> None:
        self.served.append(number)
        await self.may_answer.wait()
        self.conversation.send(response(number))


def leases(*numbers: int) -> list[pb.ConverseRequest]:
    """Returns requests of these numbers."""
    return [pb.ConverseRequest(number=number, lease=blocks_pb2.LeaseRequest()) for number in numbers]


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


def test_a_request_is_served_after_the_one_before_it() -> None:
    """And all of them are answered before the stream ends by its other side."""

    async def scenario() -> None:
        bench, channel = Bench(), Channel(*leases(1, 2, 5))
        channel.requests.put_nowait(grpc.aio.EOF)
        running = asyncio.create_task(bench.conversation.run(channel))
        await settled()
        assert bench.served == [1]
        bench.may_answer.set()
        await running
        assert (bench.served, [one.number for one in channel.taken]) == ([1, 2, 5], [1, 2, 5])

    run(scenario)


@pytest.mark.parametrize("numbers", [(0,), (1, 1), (2, 1)])
def test_a_number_that_does_not_rise_ends_it(numbers: tuple[int, ...]) -> None:
    """What came before is answered."""

    async def scenario() -> None:
        bench, channel = Bench(), Channel(*leases(*numbers, 9))
        bench.may_answer.set()
        with pytest.raises(InvalidField, match="number is"):
            await bench.conversation.run(channel)
        assert [one.number for one in channel.taken] == list(numbers[:-1])

    run(scenario)


def test_at_shutdown_what_is_under_way_is_answered_and_nothing_else() -> None:
    """The next process will be asked for the rest."""

    async def scenario() -> None:
        bench, channel = Bench(), Channel(*leases(1, 2))
        running = asyncio.create_task(bench.conversation.run(channel))
        await settled()
        bench.gate.drain()
        bench.conversation.finish(Draining())
        await settled()
        assert not running.done()
        bench.may_answer.set()
        with pytest.raises(Draining):
            await running
        assert (bench.served, [one.number for one in channel.taken]) == ([1], [1])

    run(scenario)


def test_a_request_that_comes_while_the_gate_is_closed_is_not_answered() -> None:
    """It was read before the stream was told to end: the next process is asked again."""

    async def scenario() -> None:
        bench, channel = Bench(), Channel(*leases(1))
        bench.may_answer.set()
        bench.gate.drain()
        with pytest.raises(Draining):
            await bench.conversation.run(channel)
        assert (bench.served, channel.taken) == ([], [])

    run(scenario)


def test_at_shutdown_what_waits_is_told_what_comes_of_it() -> None:
    """It is given up at the same time; the stream ends behind that."""

    async def scenario() -> None:
        bench, channel = Bench(), Channel()
        given_up = asyncio.Event()

        async def waits_over() -> None:
            await given_up.wait()
            bench.conversation.send(response(1))

        bench.conversation.waits_over = waits_over
        running = asyncio.create_task(bench.conversation.run(channel))
        await settled()
        bench.conversation.finish(Draining())
        await settled()
        assert not running.done()
        given_up.set()
        with pytest.raises(Draining):
            await running
        assert [one.number for one in channel.taken] == [1]

    run(scenario)


def test_at_shutdown_an_idle_stream_ends_at_once() -> None:
    """Before it was run, too."""

    async def scenario() -> None:
        for is_early in (True, False):
            bench, channel = Bench(), Channel()
            if is_early:
                bench.conversation.finish(Draining())
            running = asyncio.create_task(bench.conversation.run(channel))
            await settled()
            if not is_early:
                bench.conversation.finish(Draining())
            with pytest.raises(Draining):
                await running

    run(scenario)


def test_a_replaced_stream_and_one_that_is_not_read_end_at_once() -> None:
    """Whatever it is at: the other side takes nothing any more."""

    async def scenario() -> None:
        bench, channel = Bench(), Channel(*leases(1, 2), reads=False)
        running = asyncio.create_task(bench.conversation.run(channel))
        await settled()
        bench.conversation.end(Replaced())
        bench.conversation.end(SessionUnknown())
        with pytest.raises(Replaced):
            await running
        bench, channel = Bench(), Channel(*leases(*range(1, MAX_UNSENT + 3)), reads=False)
        bench.may_answer.set()
        with pytest.raises(WatcherTooSlow):
            await bench.conversation.run(channel)

    run(scenario)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_stream_that_ends_with_its_client_leaves_no_error_behind(has_begun: bool) -> None:
    """The transport gives up, and the session ends, in one turn of the event loop: nobody takes the reason."""

    async def end_both() -> None:
        bench, earlier = Bench(), asyncio.get_running_loop().create_future()  # of a stream that is not over
        running = asyncio.create_task(bench.conversation.run(Channel(*leases(1)), [] if has_begun else [earlier]))
        await settled()
        running.cancel()
        bench.conversation.end(SessionUnknown())
        await asyncio.wait([running])
        assert running.cancelled()

    async def scenario() -> None:
        unhandled: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        await end_both()
        gc.collect()
        assert not unhandled

    run(scenario)


def test_nothing_is_served_for_a_session_that_has_ended() -> None:
    """Its end in the pools comes after all that has begun."""

    async def scenario() -> None:
        bench, channel = Bench(), Channel(*leases(1))
        bench.session.state, bench.session.cause = State.ENDING, "gone"
        with pytest.raises(SessionUnknown, match="gone"):
            await bench.conversation.run(channel)
        assert bench.served == []

    run(scenario)


def test_a_call_on_a_stream_is_counted_as_a_unary_one() -> None:
    """By what it came to, and as under way until then."""

    async def scenario() -> None:
        bench = Bench()
        going = asyncio.Event()

        async def refused() -> None:
            await going.wait()
            raise InvalidField(field="f", value="v", limit="l", remedy="r")

        task = asyncio.create_task(bench.conversation.timed("Lease", refused))
        await settled()
        assert bench.gate.call_count == 1
        going.set()
        with pytest.raises(InvalidField):
            await task
        assert bench.gate.call_count == 0
        assert [(method, code) for method, code, _ in bench.gate.timings] == [("Lease", "INVALID_ARGUMENT")]

    run(scenario)


def test_a_wait_is_delivered_once() -> None:
    """By its own end or by a cancel, whichever is first; and given up if the stream ends."""

    async def scenario() -> None:
        failures: list[BaseException] = []
        waits, delivered = Waits(failures.append), list[object]()

        async def granted(moment: asyncio.Event) -> str:
            await moment.wait()
            return "granted"

        async def overdue(moment: asyncio.Event) -> str:
            await moment.wait()
            raise PoolExhausted(**dict.fromkeys(_NUMBERS, 1))

        def deliver(task: "asyncio.Task[Any]") -> None:
            delivered.append(task.result() if task.exception() is None else "refused")

        moment = asyncio.Event()
        waits.add(1, granted(moment), Patience(), deliver)
        moment.set()
        await settled()
        assert (delivered, len(waits)) == (["granted"], 0)
        assert not await waits.end(1)

        moment = asyncio.Event()
        patience = Patience()
        patience.begin(moment.set)
        waits.add(2, overdue(moment), patience, deliver)
        assert await waits.end(2)
        await settled()
        assert delivered == ["granted", "refused"]

        forever = asyncio.Event()
        task = waits.add(3, granted(forever), Patience(), deliver)
        await waits.cancel()
        assert (task.cancelled(), len(delivered), len(waits), failures) == (True, 2, 0, [])

    run(scenario)


def test_so_many_may_wait_on_one_stream() -> None:
    """A task each: there is a bound."""

    async def scenario() -> None:
        waits = Waits(lambda _: None)
        for number in range(MAX_WAITS):
            waits.check_room()
            waits.add(number, asyncio.sleep(60), Patience(), lambda _: None)
        with pytest.raises(InvalidField, match="1025th"):
            waits.check_room()
        await waits.cancel()

    run(scenario)


_NUMBERS = (
    "needed_block_count",
    "available_block_count",
    "usable_block_count",
    "free_block_count",
    "cached_block_count",
    "reserved_block_count",
    "active_block_count",
    "warm_block_count",
    "quarantined_block_count",
)
