"""Answers of acquire and lease as they are taken in, and what they wait for."""

from typing import TYPE_CHECKING, Any

from kvharbor.client import refusals
from kvharbor.client.errors import HarborError, PoolExhausted
from kvharbor.client.grants import Acquired, Grant, acquired, waiting_by
from kvharbor.client.outbox import Outgoing
from kvharbor.client.runs import BlockRun
from kvharbor.client.unanswered import Answer
from kvharbor.v1 import blocks_pb2
from kvharbor.v1 import stream_service_pb2 as stream_pb2

if TYPE_CHECKING:
    from kvharbor.client.held_blocks import HeldBlocks


class Wait:
    """One wait for room: hands to a Grant what comes. All but `cancel` is called under the guard."""

    def __init__(self, held: "HeldBlocks", guard: Any, request: blocks_pb2.AcquireRequest | None) -> None:
        self.grant = Grant(self.cancel)
        self._held = held
        self._guard = guard
        self._request = request
        self._number = 0
        self._over = False

    def begin(self, number: int) -> "Wait":
        """Waits for what request `number` is granted."""
        self._number = number
        self._held.stream.unanswered.waiters[number] = self
        return self

    def granted(self, message: blocks_pb2.Granted, spared: BlockRun) -> None:
        """Takes in the end of the wait."""
        result = acquired(message.result)
        released = self._held.own.released_since(result.held, self._number) & ~result.held.among(spared)
        if self._over:
            self._held.release_fresh([result.held, result.leased])
        elif released.any():
            # A release that was made before the grant was known may have ended a hold of it: it is asked for anew.
            self._held.release_fresh([result.held, result.leased])
            self._ask_again()
        else:
            self._held.own.add(result.held)
            self._held.own.add(result.leased)
            self._end(result)

    def lost(self, cause: HarborError) -> None:
        """Takes in that the wait comes to nothing."""
        self._end(cause)

    def cancel(self) -> None:
        """Ends the wait for the service too."""
        with self._guard():
            if self._over:
                return
            self._end(Acquired(refusal=PoolExhausted("the wait for room was cancelled here")))
            self._cancel()

    def abandon(self) -> None:
        """Ends the wait of a request that nobody wants the answer of any more."""
        self._over = True
        self._cancel()

    def _cancel(self) -> None:
        number = self._number
        message = blocks_pb2.CancelWaitRequest(request_number=number)

        def take(_: stream_pb2.ConverseResponse) -> None:
            # If it was not waiting any more its grant has come before this. By now another request may wait for it.
            self._held.stream.unanswered.waiters.pop(number, None)

        self._held.stream.put(
            Outgoing(lambda _: stream_pb2.ConverseRequest(cancel_wait=message), take, _nothing, told=lambda: None)
        )

    def _end(self, outcome: Acquired | HarborError) -> None:
        if not self._over:
            self._over = True
            self.grant.end(outcome)

    def _ask_again(self) -> None:
        def take(response: stream_pb2.ConverseResponse) -> None:
            if response.WhichOneof("result") == "refusal":
                self._end(refusals.from_item(response.refusal))
                return
            result = acquired(response.acquire.results[0])
            if result.waiting:
                self.begin(response.number)
                if self._over:
                    self._cancel()
            elif self._over:
                self._held.release_fresh([result.held, result.leased])
            else:
                self._held.own.add(result.held)
                self._held.own.add(result.leased)
                self._end(result)

        call = stream_pb2.ConverseRequest(acquire=self._request)
        self._held.stream.put(Outgoing(lambda _: call, take, self._end, grants=granted_runs))


class Answers:
    """Takes in the answers of one acquire or lease for who waits for them, or for nobody."""

    def __init__(self, held: "HeldBlocks", guard: Any, answer: Answer) -> None:
        self._held = held
        self._guard = guard
        self._answer = answer

    def taken(
        self, number: int, results: list[Acquired], request: blocks_pb2.AcquireRequest | None
    ) -> list[Acquired] | None:
        """Returns the results with their grants, all held now; None where nobody wants them, and nothing is."""
        if self._answer.abandoned:
            self._held.release_fresh(run for result in results for run in (result.held, result.leased))
            if any(result.waiting for result in results):
                Wait(self._held, self._guard, None).begin(number).abandon()
            return None
        return [self._one(number, index, result, request) for index, result in enumerate(results)]

    def _one(self, number: int, index: int, result: Acquired, request: blocks_pb2.AcquireRequest | None) -> Acquired:
        self._held.own.add(result.held)
        self._held.own.add(result.leased)
        if not result.waiting:
            return result
        again = None
        if request is not None:
            again = blocks_pb2.AcquireRequest(
                pool_id=request.pool_id, chains=[request.chains[index]], wait=request.wait
            )
        return waiting_by(Wait(self._held, self._guard, again).begin(number).grant, result)


def granted_runs(response: stream_pb2.ConverseResponse) -> BlockRun:
    """Reads what is held by the answer of an acquire."""
    return BlockRun.join(acquired(result).held for result in response.acquire.results)


def _nothing(_: HarborError) -> None:
    pass
