"""What the requests of a stream come to: each call's operation, and the response that it is put in."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvharbor.pool.errors import InvalidField
from kvharbor.server.calls import block_operations, session_operations
from kvharbor.server.calls.block_operations import Leased, Waiting
from kvharbor.server.calls.handles import number_in
from kvharbor.server.calls.sequence_operations import SequenceOperations
from kvharbor.server.calls.withdrawal import Withdrawal
from kvharbor.server.messages.status import REFUSALS, item_status
from kvharbor.server.pools.pools import Pools
from kvharbor.server.pools.served_pool import OpenedPool
from kvharbor.server.scheduling.applications import Patience
from kvharbor.server.sessions.session import Session
from kvharbor.server.stream.conversation import Conversation, Respond
from kvharbor.server.stream.waits import Waits
from kvharbor.v1 import blocks_pb2, cache_service_pb2, types_pb2
from kvharbor.v1 import stream_service_pb2 as pb

Operation = Callable[[Session, OpenedPool, Any], Awaitable[Any]]
Made = Callable[[Any], Sequence[types_pb2.Sequence]]
"""The sequences that an answer tells of for the first time."""


class Responses:
    """Serves the requests of one conversation, which it makes ready for that; then `close`."""

    def __init__(
        self, conversation: Conversation, session: Session, pools: Pools, sequences: SequenceOperations
    ) -> None:
        self._conversation = conversation
        self._session = session
        self._pools = pools
        self._sequences = sequences
        self._waits = Waits(conversation.end)
        simple: dict[str, Operation] = {
            "commit_blocks": block_operations.commit_blocks,
            "release_blocks": block_operations.release_blocks,
            "bump_namespace": session_operations.bump_namespace,
            "computing": session_operations.computing,
            "abandon": session_operations.abandon,
            "extend": sequences.extend,
            "commit": sequences.commit,
            "handoff": sequences.handoff,
            "release": sequences.release,
        }
        conversation.waits_over = self._waits.all_over
        conversation.responding = {
            **{kind: self._simple(kind, operation) for kind, operation in simple.items()},
            "acquire": self._leasing("acquire", block_operations.acquire),
            "lease": self._leasing("lease", block_operations.lease),
            "invalidate_blocks": self._leasing("invalidate_blocks", block_operations.invalidate_blocks, may_wait=False),
            "allocate": self._allocate,
            "fork": self._simple("fork", sequences.fork, lambda response: response.children),
            "adopt": self._simple("adopt", sequences.adopt, lambda response: [response.sequence]),
            "cancel_wait": self._cancel_wait,
        }

    async def close(self) -> None:
        """Gives up what waits, and takes back what has not left."""
        await self._waits.cancel()
        self._conversation.outbox.undo_all()

    def _simple(self, kind: str, operation: Operation, made: Made = lambda _: ()) -> Respond:
        name = _name(kind)

        async def respond(number: int, request: Any) -> None:
            try:
                response = await self._conversation.timed(name, self._on_pool(operation, request))
            except REFUSALS as refused:
                self._conversation.refuse(number, refused)
            else:
                undo = functools.partial(self._withdraw, request, made(response))
                self._conversation.send(pb.ConverseResponse(number=number, **{kind: response}), undo)

        return respond

    def _leasing(self, kind: str, operation: Operation, *, may_wait: bool = True) -> Respond:
        name = _name(kind)

        async def respond(number: int, request: Any) -> None:
            try:
                if may_wait and request.HasField("wait"):
                    self._waits.check_room()
                answer: Leased[Any, Any] = await self._conversation.timed(name, self._on_pool(operation, request))
            except REFUSALS as refused:
                self._conversation.refuse(number, refused)
                return
            # In one step: nobody may be granted what nobody waits for.
            response = pb.ConverseResponse(number=number, **{kind: answer.response})
            if answer.waiting is not None:
                self._wait(number, request.pool_id, answer.waiting)
            self._conversation.send(response, answer.undo)

        return respond

    def _wait(self, number: int, pool_id: str, waiting: Waiting[Any]) -> None:
        waiter = waiting.waiter
        admission = self._session.opened[pool_id].served.admission

        def deliver(task: "asyncio.Task[Any]") -> None:
            granted = blocks_pb2.Granted(chain_index=waiting.chain_index)
            try:
                result = task.result()
            except REFUSALS as refused:
                if waiter.application.patience.is_over:
                    # Its end was asked for, and is what that is answered with.
                    return
                granted.result.status.CopyFrom(item_status(refused))
                self._conversation.send(pb.ConverseResponse(number=number, granted=granted))
                return
            granted.result.CopyFrom(waiting.message(result))
            response = pb.ConverseResponse(number=number, granted=granted)
            self._conversation.send(response, lambda: waiter.application.give_back(result))

        self._waits.add(number, admission.outcome(waiter), waiter.application.patience, deliver)

    async def _allocate(self, number: int, request: cache_service_pb2.AllocateRequest) -> None:
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        patience = Patience(begins=lambda: begins.set_result(None))

        async def allocate(session: Session, opened: OpenedPool, asked: Any) -> Any:
            return await self._sequences.allocate(session, opened, asked, patience)

        def deliver(task: "asyncio.Task[Any]") -> None:
            try:
                response = task.result()
            except REFUSALS as refused:
                self._conversation.refuse(number, refused)
            else:
                undo = functools.partial(self._withdraw, request, [response.sequence])
                self._conversation.send(pb.ConverseResponse(number=number, allocate=response), undo)

        if request.HasField("wait") or request.HasField("pending_wait"):
            try:
                self._waits.check_room()
            except InvalidField as refused:
                self._conversation.refuse(number, refused)
                return
        work = self._conversation.timed("Allocate", self._on_pool(allocate, request))
        task = self._waits.add(number, work, patience, deliver)
        await asyncio.wait([task, begins], return_when=asyncio.FIRST_COMPLETED)

    async def _cancel_wait(self, number: int, request: blocks_pb2.CancelWaitRequest) -> None:
        ending = functools.partial(self._waits.end, request.request_number)
        was_cancelled = await self._conversation.timed("CancelWait", ending)
        response = blocks_pb2.CancelWaitResponse(cancelled=was_cancelled)
        self._conversation.send(pb.ConverseResponse(number=number, cancel_wait=response))

    def _on_pool(self, operation: Operation, request: Any) -> Callable[[], Awaitable[Any]]:
        async def work() -> Any:
            return await operation(self._session, self._pools.opened(self._session, request.pool_id), request)

        return work

    def _withdraw(self, request: Any, made: Sequence[types_pb2.Sequence]) -> None:
        """Ends sequences that nobody was told of, unless they have a name."""
        opened = self._session.opened.get(request.pool_id)
        if made and opened is not None and not self._session.ended:
            withdrawal = Withdrawal(self._session, opened, request.request_id)
            withdrawal.note(*(number_in(sequence.sequence_id, opened, self._pools) for sequence in made))
            withdrawal.withdraw()


def _name(kind: str) -> str:
    return "".join(word.capitalize() for word in kind.split("_"))
