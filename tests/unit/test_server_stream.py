"""A stream from the inside: requests one after the other, and its ends."""

import asyncio
import gc
from typing import Any

import grpc
import pytest

from kvharbor.pool.errors import InvalidField
from kvharbor.server.calls.gate import Gate
from kvharbor.server.errors import Draining, WatcherTooSlow
from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session, State
from kvharbor.server.stream.conversation import Conversation, Replaced
from kvharbor.server.stream.outbox import MAX_UNSENT
from scenarios import run, settled
from stream_channel import Channel, leases, response


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
