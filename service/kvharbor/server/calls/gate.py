"""What every call passes: is the service ready, what is under way, and how refusals become statuses."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import structlog

from kvharbor.server.calls.timings import CallTimings
from kvharbor.server.errors import Draining, ServerError, Starting
from kvharbor.server.messages.status import CODES, REFUSALS, abort
from kvharbor.server.session_errors import AdminRequired, SessionRequired
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from kvharbor.server.sessions.sessions import Sessions

log = structlog.get_logger(__name__)

SESSION_METADATA = "kvharbor-session"
EPOCH_METADATA = "kvharbor-epoch"

Q = TypeVar("Q")
R = TypeVar("R")


class Gate:
    """Refuses calls before the service is ready and while it drains; counts those under way, and times all.

    `reply_metadata` goes with every reply and refusal, as the trailer of its call.
    """

    def __init__(self, epoch: str) -> None:
        self.reply_metadata = ((EPOCH_METADATA, epoch),)
        self.refusal: ServerError | None = Starting()
        self.call_count = 0
        self.stream_count = 0
        self.timings = CallTimings()
        self._idle: asyncio.Future[None] | None = None

    def open(self) -> None:
        """Lets calls in."""
        self.refusal = None

    def drain(self) -> None:
        """Refuses new calls; those under way go on."""
        self.refusal = Draining()

    def enter(self) -> None:
        """Counts a call that begins, or raises the refusal."""
        if self.refusal is not None:
            raise self.refusal
        self.call_count += 1

    def leave(self) -> None:
        """Counts a call that ends."""
        self.call_count -= 1
        if not self.call_count and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def idle(self) -> None:
        """Waits until no call is under way."""
        if self.call_count:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle


class Callers:
    """Tells who calls: by the session token in the call's metadata, as gRPC shows no peer credentials."""

    def __init__(self, sessions: Sessions, anonymous_tenant: str | None) -> None:
        self._sessions = sessions
        self._anonymous = (
            None if anonymous_tenant is None else Peer(pid=0, uid=None, tenant=anonymous_tenant, administrator=False)
        )

    def token(self, context: "Context") -> str:
        """Returns the session token of a call, or raises SessionRequired."""
        for name, value in context.invocation_metadata() or ():
            if name == SESSION_METADATA:
                return str(value)
        raise SessionRequired

    def session(self, context: "Context") -> Session:
        """Returns the session of a call; raises SessionRequired or SessionUnknown."""
        return self._sessions.of(self.token(context))

    def session_or_none(self, context: "Context") -> Session | None:
        """Returns the session of a call, None without a token, or raises SessionUnknown."""
        try:
            return self.session(context)
        except SessionRequired:
            return None

    def administrator(self, context: "Context") -> Peer:
        """Returns who calls; raises AdminRequired for one who may not do everything."""
        peer = self.session(context).peer
        if not peer.administrator:
            raise AdminRequired(peer.uid)
        return peer

    def peer(self, context: "Context") -> Peer:
        """Returns who calls, with a session or as the tenant that the settings name for others."""
        session = self.session_or_none(context)
        peer = self._anonymous if session is None else session.peer
        if peer is None:
            raise SessionRequired
        return peer


Context = grpc.aio.ServicerContext[Any, Any]


class Gated(Protocol):
    """A servicer whose calls pass a gate."""

    gate: Gate


S = TypeVar("S", bound=Gated)
Call = Callable[[S, Q, Context], Coroutine[Any, Any, R]]
Stream = Callable[[S, Q, Context], AsyncIterator[R]]
Conversing = Callable[[S, AsyncIterator[Q], Context], Coroutine[Any, Any, None]]


def answered(method: Callable[[S, Q, Context], Awaitable[R]]) -> Call[S, Q, R]:
    """Makes a unary method pass the gate, and ends its call with a status for whatever it raises."""

    @functools.wraps(method)
    async def call(servicer: S, request: Q, context: Context) -> R:
        gate = servicer.gate
        context.set_trailing_metadata(gate.reply_metadata)
        began_at = time.perf_counter()

        def count(code: str) -> None:
            # Before the answer leaves: who has it finds it counted.
            gate.timings.add(method.__name__, code, time.perf_counter() - began_at)

        try:
            gate.enter()
        except REFUSALS as refused:
            count(CODES[type(refused)].name)
            await abort(context, refused)
        try:
            response = await method(servicer, request, context)
            count("OK")
            return response
        except REFUSALS as refused:
            count(CODES[type(refused)].name)
            await abort(context, refused)
        except asyncio.CancelledError:
            count("CANCELLED")
            raise
        except Exception:
            count("INTERNAL")
            await _abort_unexpected(context, method.__name__)
        finally:
            gate.leave()

    return call


def streamed(method: Callable[[S, Q, Context], AsyncIterator[R]]) -> Stream[S, Q, R]:
    """Does for a method that yields its responses what `answered` does; shutdown does not wait for it."""

    @functools.wraps(method)
    async def call(servicer: S, request: Q, context: Context) -> AsyncIterator[R]:
        gate = servicer.gate
        context.set_trailing_metadata(gate.reply_metadata)
        gate.stream_count += 1
        try:
            if gate.refusal is not None:
                raise gate.refusal
            async for response in method(servicer, request, context):
                yield response
        except REFUSALS as refused:
            await abort(context, refused)
        except Exception:
            await _abort_unexpected(context, method.__name__)
        finally:
            gate.stream_count -= 1

    return call


def conversing(method: Callable[[S, AsyncIterator[Q], Context], Awaitable[None]]) -> Conversing[S, Q]:
    """Does for a method that reads and writes a stream what `streamed` does."""

    @functools.wraps(method)
    async def call(servicer: S, requests: AsyncIterator[Q], context: Context) -> None:
        gate = servicer.gate
        context.set_trailing_metadata(gate.reply_metadata)
        gate.stream_count += 1
        try:
            if gate.refusal is not None:
                raise gate.refusal
            await method(servicer, requests, context)
        except REFUSALS as refused:
            await abort(context, refused)
        except (grpc.aio.AbortError, grpc.aio.InternalError):
            # gRPC's own, also where the caller has left in the same moment.
            raise
        except Exception:
            await _abort_unexpected(context, method.__name__)
        finally:
            gate.stream_count -= 1

    return call


async def _abort_unexpected(context: Context, method_name: str) -> NoReturn:
    # The text of an unknown error may hold anything, a caller's tokens too: it stays in the log's traceback.
    log.exception("call failed unexpectedly", call=method_name)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the log of the service has more")
