"""The session's one stream of calls in order: opened when it is first needed, and anew as long as the session lives.

A thread reads what comes back. It knows no more than the call that it reads, so that a forgotten harbor still ends.
"""

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from kvharbor.client import channel, refusals
from kvharbor.client.errors import (
    CallerMistake,
    DeadlineExceeded,
    Full,
    Gone,
    HarborError,
    InvalidField,
    ResumeRequired,
    ServiceUnreachable,
    SessionGone,
    StateRefused,
    Unavailable,
    WatcherTooSlow,
)
from kvharbor.client.outbox import Outbox, Outgoing
from kvharbor.client.runs import run_of
from kvharbor.client.signs import Signs
from kvharbor.client.standing import State
from kvharbor.client.stream_reader import read, tell
from kvharbor.client.unanswered import Answer, Unanswered
from kvharbor.v1 import blocks_pb2, errors_pb2
from kvharbor.v1 import stream_service_pb2 as stream_pb2

if TYPE_CHECKING:
    from kvharbor.client.link import Link

JOIN_S = 2.0


class Stream:
    """Sends requests in order, and hands each answer to who has sent it. Threads may share it.

    Its state changes under the link's guard only. A request is unanswered until its answer is taken in.
    """

    def __init__(self, link: "Link") -> None:
        self._link = link
        self.unanswered = Unanswered()
        self._recalled: dict[str, Callable[[int], object]] = {}
        self._life = -1
        self._used = False
        self._call: Any = None
        self.signs = Signs(weakref.WeakMethod(self._look))
        self._outbox = Outbox((), self.signs)
        self._later: deque[Callable[[], object]] = deque()
        self._reader: threading.Thread | None = None

    def require_session(self) -> None:
        """Raises what keeps this process from sending anything."""
        self._link.require_open()
        channel.require_leader(self._link.options)
        self._link.require_session()
        self._link.standing.require(self._link.standing.epochs)

    def send(self, outgoing: Outgoing) -> Outgoing:
        """Sends a request after all before it; while the service is away it is kept for the next process."""
        self.require_session()
        with self._link.guard:
            return self._put(outgoing)

    def ask(self, make: Callable[[Answer], Outgoing], timeout_s: float | None = None) -> Any:
        """Sends what `make` returns, and returns what its Answer is set to, or raises what that fails with.

        While the service is away it waits for it, before anything is sent. Where no answer comes in time, the Answer
        is `abandoned`.
        """
        link = self._link
        self._require_another_thread()
        self.require_session()
        timeout_s = link.options.timeout_s if timeout_s is None else timeout_s
        until_s = time.monotonic() + timeout_s
        epochs = link.standing.epochs
        answer = Answer()
        with link.guard:
            link.wait_until_settled(epochs, until_s)
            self._put(make(answer))
            try:
                link.wait_for(lambda: answer.there or link.standing.state is State.ENDED, until_s - time.monotonic())
                if not answer.there:
                    link.standing.require(epochs)
                    raise self.late(timeout_s)
            finally:
                answer.abandoned = not answer.there
        return answer.result()

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until all that was sent by now is answered; raises DeadlineExceeded or ServiceAway if it is not."""
        link = self._link
        self._require_another_thread()
        self.require_session()
        timeout_s = link.options.timeout_s if timeout_s is None else timeout_s
        epochs = link.standing.epochs
        with link.guard:
            last = self.unanswered.last_number

            def answered() -> bool:
                return not self.unanswered.any_until(last) or link.standing.state is State.ENDED

            if not link.wait_for(answered, timeout_s):
                raise self.late(timeout_s)
            link.standing.require(epochs)

    def late(self, timeout_s: float) -> Unavailable:
        """Returns the error of who has waited for an answer for so long."""
        if self._link.standing.state is not State.PRESENT:
            return self._link.standing.still_away()
        target = self._link.address.target
        return DeadlineExceeded(
            f"no answer from {target} within {timeout_s} s: give the call a longer timeout, or look whether the "
            f"service is overloaded",
            metadata={"address": target, "timeoutS": str(timeout_s)},
        )

    def drain(self, timeout_s: float) -> None:
        """Waits until all that was sent is answered, as long as the service is there."""
        link = self._link
        with link.guard:
            last = self.unanswered.last_number
            link.wait_for(
                lambda: not self.unanswered.any_until(last) or link.standing.state is not State.PRESENT, timeout_s
            )

    def open(self) -> None:
        """Opens the stream if it is not open, so that recalls come; under the guard."""
        self._used = True
        self._reopen()

    def put(self, outgoing: Outgoing) -> None:
        """Sends a request, unless the session has ended, or is another process's; under the guard."""
        if self._link.standing.state is not State.ENDED and not self._link.forked:
            self._put(outgoing)

    def later(self, tell: Callable[[], object]) -> None:
        """Has something of the user's called once the guard is free; under the guard."""
        self._later.append(tell)

    def run_later(self) -> None:
        """Calls what was to be called later; not under the guard."""
        while self._later:
            with contextlib.suppress(IndexError):  # another thread was first
                tell(self._later.popleft())

    def forget_pool(self, pool_id: str) -> None:
        """Passes on no recalls of a pool any more."""
        self._recalled.pop(pool_id, None)

    def on_recall(self, pool_id: str, recalled: Callable[[int], object]) -> None:
        """Has recalls of a pool's blocks passed on, in the stream's own thread and not under the guard."""
        self._recalled[pool_id] = recalled

    # What becomes of the session: all under the guard

    def replaced(self) -> None:
        """The next process is to be told how things stand: fails what cannot be sent to it, keeps what can."""
        self._end_call()
        self.unanswered.tell()
        self.unanswered.lose(
            ServiceUnreachable("the service's process has ended before it has answered: nothing came of it")
        )

    def returned(self) -> None:
        """The next process knows all: goes on with what is still to be answered."""
        self._reopen()

    def void(self, cause: HarborError) -> None:
        """The epoch or the session has ended, and all this with it."""
        self._end_call()
        self.unanswered.fail(cause)
        self._recalled.clear()

    def close(self) -> None:
        """Ends the call and its threads; not under the guard."""
        if self._link.forked:  # gRPC's threads are not there in a child
            return
        with self._link.guard:
            reader = self._reader
            self._end_call()
        if reader is not None and reader is not threading.current_thread():
            reader.join(JOIN_S)

    def _require_another_thread(self) -> None:
        if threading.current_thread() is self._reader:
            raise InvalidField.of(
                "thread", "the stream's own", limit="another one to wait in", remedy="wait for no call in a callback"
            )

    def _put(self, outgoing: Outgoing) -> Outgoing:
        self.unanswered.add(outgoing)
        if self._call is not None:
            self._outbox.put(outgoing)
        else:
            self.open()
        return outgoing

    def _look(self) -> None:
        """Has the thread that sends ask the signs; there is one from here on, while the service is there."""
        if self._link.forked:
            return
        with self._link.guard:
            if self._call is None and self._link.standing.state is not State.ENDED:
                self.open()
            self._outbox.look()

    def _reopen(self) -> None:
        standing = self._link.standing
        if not self._used or self._call is not None or standing.state is not State.PRESENT:
            return
        self._life = standing.life
        waiting = self.unanswered.all()
        for outgoing in waiting:
            outgoing.sent = False
        self._outbox = Outbox(waiting, self.signs)
        self._call = self._link.converse(self._outbox)
        arguments = (weakref.ref(self), self._call)
        self._reader = threading.Thread(target=read, args=arguments, name="kvharbor-stream", daemon=True)
        self._reader.start()

    def _end_call(self) -> None:
        call, self._call = self._call, None
        if self._link.forked:  # locks of the call may be held by threads that are not there in a child
            return
        self._outbox.close()
        if call is not None:
            call.cancel()

    # In the thread that reads

    def take(self, call: Any, response: stream_pb2.ConverseResponse) -> bool:
        """Takes in what has come; False when the call is not the present one any more."""
        link = self._link
        kind = response.WhichOneof("result")
        if kind == "refusal" and response.refusal.reason == errors_pb2.ERROR_REASON_RESUME_REQUIRED:
            # Of a process that has still to be told what is held: the end of the last one was not seen before the call.
            self.fail(call, refusals.from_item(response.refusal))
            return False
        with link.guard:
            if self._call is not call:
                return False
            if kind == "granted":
                self._take_grant(response)
            elif kind == "recall":
                self._take_recall(response.recall)
            else:
                self._take_answer(response)
            link.wake()
        self.run_later()
        return True

    def _take_answer(self, response: stream_pb2.ConverseResponse) -> None:
        outgoing = self.unanswered.pop(response.number)
        if outgoing is None:
            return
        if outgoing.grants is not None:
            if self.unanswered.any_release_unsent():
                self.unanswered.spare(outgoing.grants(response))
            self._outbox.grants_known()
        outgoing.take(response)

    def _take_grant(self, response: stream_pb2.ConverseResponse) -> None:
        waiter = self.unanswered.waiters.pop(response.number, None)
        if waiter is None:
            return
        held = run_of(response.granted.result.held)
        with self._outbox.paused():
            spared = self.unanswered.spare(held)
        waiter.granted(response.granted, spared)

    def _take_recall(self, recall: blocks_pb2.Recall) -> None:
        recalled = self._recalled.get(recall.pool_id)
        if recalled is not None:
            self.later(lambda: recalled(recall.block_count))

    def fail(self, call: Any, error: HarborError) -> None:
        """Takes in that the call has ended, and makes another unless the reason stays."""
        link = self._link
        with link.guard:
            if self._call is not call:
                return
            self._end_call()
            stays = _stays(error)
            if stays:
                self.unanswered.fail(error)
            else:
                self.unanswered.lose(_for_the_unanswered(error))
            link.wake()
            # The end of a process is seen a moment after that of its connections.
            life = self._life
            if not stays and not link.wait_for(lambda: link.standing.news_since(life), channel.MAX_NEWS_S):
                self._reopen()
        self.run_later()

    def error(self, failure: grpc.RpcError | None) -> HarborError:
        """Returns what the end of the call means."""
        if failure is None:
            return ServiceUnreachable("the service has ended the stream")
        return self._link.error(failure, None)

    def __del__(self) -> None:
        # Forgotten without a close: the threads have no other way to learn it.
        if "_outbox" in vars(self) and not self._link.forked:
            self._end_call()


def _for_the_unanswered(error: HarborError) -> HarborError:
    """Returns what requests are told that a call has ended with.

    A process that does not know the session is another one: what it means for the session the side socket tells.
    """
    if isinstance(error, ResumeRequired | SessionGone):
        return ServiceUnreachable("the service's process has ended before it has answered: nothing came of it")
    return error


def _stays(error: HarborError) -> bool:
    """Whether what a call has ended with is to be expected of the next one too."""
    if isinstance(error, ResumeRequired | SessionGone | WatcherTooSlow):
        return False
    return isinstance(error, CallerMistake | StateRefused | Full | Gone)
