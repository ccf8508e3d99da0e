"""What can go wrong for a client, sorted by what the caller should do.

    HarborError
      CallerMistake       correct the call: InvalidField, LayoutInvalid, RequestTooLarge, CursorOutOfRange,
                          MessageTooLarge, PoolAmbiguous, SessionRequired, AdminRequired
      StateRefused        do not repeat it as it is: CommitBackwards, StaleGeneration, LayoutMismatch,
                          PoolSizeMismatch, PoolInUse, BlockHeld, BlockNotHeld, RequestIdReused,
                          SequenceBusy, SequenceInDoubt, SequenceEnded, ResumeRequired, PeerUnproven,
                          RankTaken, DeviceNotVisible, MpsClientRefused, PoolDevicesMismatch,
                          UpgradeFailed
      Full                make room or come again after `retry_after_s`: PoolExhausted, TablesFull,
                          WarmBudgetExceeded, TooManyWarmTasks, DescriptorsExhausted, InsufficientMemory
      Gone                start over: PoolNotFound, SequenceNotFound, SequenceLost, EpochEnded, PinNotFound,
                          HandoffNotFound, BlockNotFound, WarmTaskNotFound, SessionNotFound,
                          RevisionCompacted, WatcherTooSlow
        SessionGone       connect again: SessionLost, StaleEpoch, HarborClosed
      Unavailable         repeat it later: ServiceUnreachable, ServiceAway, Starting, Draining,
                          DeadlineExceeded
      ServiceBug          report it: InvariantViolation

Each leaf has a constant `reason`, that of `kvharbor.v1.ErrorReason` where the service knows it. A reason
that this client does not know becomes the group that its gRPC code stands for. Layouts and views have
their own tree, `kvharbor.gpumem.GpumemError`; where mapping a pool's memory fails with one of these, it
is the cause of a StateRefused with its reason, such as CUDA_UNAVAILABLE.
"""

from collections.abc import Mapping
from typing import Self

import grpc


class HarborError(Exception):
    """The root of what `kvharbor.client` raises on purpose.

    `reason` names the cause for programs, `metadata` holds every value of the message as text, `code` is the
    gRPC code, and `retry_after_s` is when to try again, where the service said so.
    """

    reason: str = ""
    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    outcome_unknown: bool = False
    """Whether the call may have taken effect although it failed.

    What refuses a call for now, such as ServiceAway, says so where an earlier process of the service was sent it.
    """

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s


class CallerMistake(HarborError):
    """The call can never succeed as it is: correct it."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class InvalidField(CallerMistake):
    """A field has a value that can never be right."""

    reason = "INVALID_FIELD"

    @classmethod
    def of(cls, field: str, value: object, *, limit: str, remedy: str) -> Self:
        """Builds the error for a value that was refused before anything was sent."""
        text = repr(value)
        text = text if len(text) <= 80 else f"{text[:77]}..."
        return cls(
            f"{field} is {text}, must be {limit}: {remedy}",
            metadata={"field": field, "value": text, "limit": limit, "remedy": remedy},
        )


class LayoutInvalid(CallerMistake):
    """The layout contradicts itself or a bound."""

    reason = "LAYOUT_INVALID"


class RequestTooLarge(CallerMistake):
    """The request needs more blocks than the pool can ever give."""

    reason = "REQUEST_TOO_LARGE"
    code = grpc.StatusCode.OUT_OF_RANGE


class CursorOutOfRange(CallerMistake):
    """A cursor would pass the end of what is there."""

    reason = "CURSOR_OUT_OF_RANGE"
    code = grpc.StatusCode.OUT_OF_RANGE


class MessageTooLarge(CallerMistake):
    """The message is larger than gRPC carries here; the service has not seen it."""

    reason = "MESSAGE_TOO_LARGE"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class PoolAmbiguous(CallerMistake):
    """Several tenants have a pool of this name, none of them the caller's; `metadata` has tenants and pool ids."""

    reason = "POOL_AMBIGUOUS"


class SessionRequired(CallerMistake):
    """The call needs a session of this process: the harbor is over TCP, or a member of another process's session."""

    reason = "SESSION_REQUIRED"
    code = grpc.StatusCode.UNAUTHENTICATED


class AdminRequired(CallerMistake):
    """The call is for administrators."""

    reason = "ADMIN_REQUIRED"
    code = grpc.StatusCode.PERMISSION_DENIED


class StateRefused(HarborError):
    """The state of things says no: repeating the call as it is will not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class CommitBackwards(StateRefused):
    """computed_tokens went backwards."""

    reason = "COMMIT_BACKWARDS"


class StaleGeneration(StateRefused):
    """A named block is not that content any more, or not in that place of the table."""

    reason = "STALE_GENERATION"


class LayoutMismatch(StateRefused):
    """The pool exists with another layout; `metadata` has one key a differing field."""

    reason = "LAYOUT_MISMATCH"


class PoolSizeMismatch(StateRefused):
    """The pool exists with another size."""

    reason = "POOL_SIZE_MISMATCH"


class PoolInUse(StateRefused):
    """The pool is in use and cannot be dropped."""

    reason = "POOL_IN_USE"


class BlockHeld(StateRefused):
    """The block or one of its descendants is held and cannot be evicted."""

    reason = "BLOCK_HELD"


class BlockNotHeld(StateRefused):
    """The session does not hold the block by itself, or not in the state that the call needs."""

    reason = "BLOCK_NOT_HELD"


class RequestIdReused(StateRefused):
    """The request_id was used with other arguments."""

    reason = "REQUEST_ID_REUSED"


class SequenceBusy(StateRefused):
    """A copy from or into the sequence is under way, or a DecodeBatch of this process has it."""

    reason = "SEQUENCE_BUSY"


class SequenceInDoubt(StateRefused):
    """An earlier commit, hand-off or extend of the sequence ended without an answer, and is to be repeated [C5]."""

    reason = "SEQUENCE_IN_DOUBT"


class SequenceEnded(StateRefused):
    """The sequence was released or handed off by this process."""

    reason = "SEQUENCE_ENDED"


class ResumeRequired(StateRefused):
    """The service's process was replaced, and the session has not resumed the pool there; the harbor does so."""

    reason = "RESUME_REQUIRED"


class PeerUnproven(StateRefused):
    """The kernel gives the service no proof of which process connects; `metadata` has the remedy."""

    reason = "PEER_UNPROVEN"


class RankTaken(StateRefused):
    """Another member of the session has this rank."""

    reason = "RANK_TAKEN"


class DeviceNotVisible(StateRefused):
    """The pool lies on a device that this process does not see; `metadata` has those that it sees."""

    reason = "DEVICE_NOT_VISIBLE"


class MpsClientRefused(StateRefused):
    """This process uses the device through CUDA MPS, and the service does not allow that."""

    reason = "MPS_CLIENT_REFUSED"


class PoolDevicesMismatch(StateRefused):
    """The pool exists on other devices."""

    reason = "POOL_DEVICES_MISMATCH"


class UpgradeFailed(StateRefused):
    """The process that was to take over from the service's does not start; `metadata` has the cause."""

    reason = "UPGRADE_FAILED"


class Full(HarborError):
    """There is no room now: free some, ask for less, or come again after `retry_after_s`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class PoolExhausted(Full):
    """The request does not fit now; `metadata` says what holds the memory."""

    reason = "POOL_EXHAUSTED"


class TablesFull(Full):
    """The sequences of this session have as much in their block tables as they may: release some."""

    reason = "TABLES_FULL"


class WarmBudgetExceeded(Full):
    """The pin would exceed the pool's warm budget."""

    reason = "WARM_BUDGET_EXCEEDED"


class TooManyWarmTasks(Full):
    """The pool has as many unfinished warm tasks as it may."""

    reason = "TOO_MANY_WARM_TASKS"


class DescriptorsExhausted(Full):
    """The service has no file descriptor left; `metadata` has the limit and the remedy."""

    reason = "DESCRIPTORS_EXHAUSTED"


class InsufficientMemory(Full):
    """Not enough memory is left for the pool."""

    reason = "INSUFFICIENT_MEMORY"
    code = grpc.StatusCode.FAILED_PRECONDITION


class Gone(HarborError):
    """What the call named is not there, or not any more."""

    code = grpc.StatusCode.NOT_FOUND


class PoolNotFound(Gone):
    """No such pool, or another tenant's."""

    reason = "POOL_NOT_FOUND"


class SequenceNotFound(Gone):
    """The handle never existed, or belongs to another session."""

    reason = "SEQUENCE_NOT_FOUND"


class SequenceLost(Gone):
    """The service's new process did not take the sequence up again; its `metadata` has why."""

    reason = "SEQUENCE_LOST"


class EpochEnded(Gone):
    """What the call names is of an epoch that has ended, and with it all the KV that was in the pool."""

    reason = "EPOCH_ENDED"


class PinNotFound(Gone):
    """No warm pin of that name in this tenant."""

    reason = "PIN_NOT_FOUND"


class HandoffNotFound(Gone):
    """The hand-off token is unknown, used or expired."""

    reason = "HANDOFF_NOT_FOUND"


class BlockNotFound(Gone):
    """That block does not hold that content."""

    reason = "BLOCK_NOT_FOUND"


class WarmTaskNotFound(Gone):
    """No warm task of the pool waits to be claimed."""

    reason = "WARM_TASK_NOT_FOUND"


class SessionNotFound(Gone):
    """No session of that id lives or waits for the end of its processes."""

    reason = "SESSION_NOT_FOUND"


class RevisionCompacted(Gone):
    """The revision to resume a watch from is no longer kept: watch from 0."""

    reason = "REVISION_COMPACTED"
    code = grpc.StatusCode.OUT_OF_RANGE


class WatcherTooSlow(Gone):
    """The watch was cut off because it was read too slowly: watch again."""

    reason = "WATCHER_TOO_SLOW"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class SessionGone(Gone):
    """The session has ended, and with it all of its sequences."""

    code = grpc.StatusCode.UNAUTHENTICATED


class SessionLost(SessionGone):
    """The service has ended the session, or has ended itself together with its state."""

    reason = "SESSION_UNKNOWN"


class StaleEpoch(SessionGone):
    """The handle is of an earlier life of the service."""

    reason = "STALE_EPOCH"
    code = grpc.StatusCode.FAILED_PRECONDITION


class HarborClosed(SessionGone):
    """This process closed the harbor, or is a fork of the one that opened it."""

    reason = "HARBOR_CLOSED"


class Unavailable(HarborError):
    """The service does not answer now; the same call may succeed later."""

    code = grpc.StatusCode.UNAVAILABLE


class ServiceUnreachable(Unavailable):
    """Nobody answers at the address."""

    reason = "SERVICE_UNREACHABLE"
    outcome_unknown = True


class ServiceAway(Unavailable):
    """The service's process has ended and is not back yet; the next one has not been sent the call [C11].

    `outcome_unknown` says whether one before it has, which may have taken it.
    """

    reason = "SERVICE_AWAY"


class Starting(Unavailable):
    """The service is reserving memory."""

    reason = "STARTING"


class Draining(Unavailable):
    """The service is shutting down."""

    reason = "DRAINING"


class DeadlineExceeded(Unavailable):
    """No answer came within the call's deadline."""

    reason = "DEADLINE_EXCEEDED"
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    outcome_unknown = True


class ServiceBug(HarborError):
    """The service failed in a way that it should not."""

    code = grpc.StatusCode.INTERNAL
    outcome_unknown = True


class InvariantViolation(ServiceBug):
    """A bug of kvharbor; the service process ends after it."""

    reason = "INVARIANT_VIOLATION"
