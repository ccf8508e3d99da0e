/// @file
/// What can go wrong for a worker, sorted by what it should do. The tree and the reasons are those of the Python
/// client.
///
///     HarborError
///       CallerMistake       correct the call
///       StateRefused        do not repeat it as it is
///       Full                make room, or come again after `retry_after`
///       Gone                start over
///         SessionGone       connect again
///       Unavailable         repeat it later
///         Unanswered        the call may have taken effect
///       ServiceBug          report it
///
/// Each leaf has a constant `kReason`, that of `kvharbor.v1.ErrorReason` where the service knows it. A reason that this
/// client does not know becomes the group that its status code stands for. Failed system calls, such as those for want
/// of memory or descriptors, are `std::system_error`.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvharbor {
namespace detail {
class Link;
}  // namespace detail

/// Every value of an error's message as text, under lowerCamel keys with the unit in the key.
using Metadata = std::map<std::string, std::string>;

/// All that an error says.
struct Refusal {
  std::string reason;   ///< Names the cause for programs.
  std::string message;  ///< For people.
  Metadata metadata;    ///< Keys as errors.proto lists them with the reason.
  std::optional<std::chrono::milliseconds> retry_after = std::nullopt;  ///< Where the service said so.
};

/// The root of what this library throws on purpose.
class HarborError : public std::runtime_error {
 public:
  explicit HarborError(Refusal refusal) : std::runtime_error(refusal.message), refusal_(std::move(refusal)) {}

  /// Names the cause for programs; empty where the service gave none.
  const std::string& reason() const { return refusal_.reason; }
  /// Every value of the message.
  const Metadata& metadata() const { return refusal_.metadata; }
  /// When to try again, where the service said so.
  std::optional<std::chrono::milliseconds> retry_after() const { return refusal_.retry_after; }
  /// Whether the call may have taken effect although it failed. What refuses a call for now, such as ServiceAway, says
  /// so where an earlier process of the service was sent it.
  virtual bool outcome_unknown() const { return may_have_effect_; }

 private:
  friend class detail::Link;

  Refusal refusal_;
  bool may_have_effect_ = false;
};

/// The call can never succeed as it is: correct it.
class CallerMistake : public HarborError {
 public:
  using HarborError::HarborError;
};

/// The state of things says no: repeating the call as it is will not help.
class StateRefused : public HarborError {
 public:
  using HarborError::HarborError;
};

/// There is no room now: free some, ask for less, or come again after `retry_after`.
class Full : public HarborError {
 public:
  using HarborError::HarborError;
};

/// What the call named is not there, or not any more.
class Gone : public HarborError {
 public:
  using HarborError::HarborError;
};

/// The session has ended, and with it all of its sequences.
class SessionGone : public Gone {
 public:
  using Gone::Gone;
};

/// The service does not answer now; the same call may succeed later.
class Unavailable : public HarborError {
 public:
  using HarborError::HarborError;
};

/// The service, or this library, failed in a way that it should not.
class ServiceBug : public HarborError {
 public:
  using HarborError::HarborError;
  bool outcome_unknown() const override { return true; }
};

/// The service did not answer, and may have taken the call.
class Unanswered : public Unavailable {
 public:
  using Unavailable::Unavailable;
  bool outcome_unknown() const override { return true; }
};

/// Declares a leaf of the tree.
#define KVHARBOR_ERROR(Name, Group, Reason)        \
  class Name : public Group {                      \
   public:                                         \
    static constexpr const char* kReason = Reason; \
    using Group::Group;                            \
  }

/// A field has a value that can never be right.
KVHARBOR_ERROR(InvalidField, CallerMistake, "INVALID_FIELD");
/// The layout contradicts itself or a bound.
KVHARBOR_ERROR(LayoutInvalid, CallerMistake, "LAYOUT_INVALID");
/// The request needs more blocks than the pool can ever give.
KVHARBOR_ERROR(RequestTooLarge, CallerMistake, "REQUEST_TOO_LARGE");
/// A cursor would pass the end of what is there.
KVHARBOR_ERROR(CursorOutOfRange, CallerMistake, "CURSOR_OUT_OF_RANGE");
/// The message is larger than gRPC carries here; the service has not seen it.
KVHARBOR_ERROR(MessageTooLarge, CallerMistake, "MESSAGE_TOO_LARGE");
/// The call needs a session of its own: a member of another's makes none.
KVHARBOR_ERROR(SessionRequired, CallerMistake, "SESSION_REQUIRED");
/// The call is for administrators.
KVHARBOR_ERROR(AdminRequired, CallerMistake, "ADMIN_REQUIRED");
/// computed_tokens went backwards.
KVHARBOR_ERROR(CommitBackwards, StateRefused, "COMMIT_BACKWARDS");
/// A named block is not that content any more, or not in that place of the table.
KVHARBOR_ERROR(StaleGeneration, StateRefused, "STALE_GENERATION");
/// The pool exists with another layout; `metadata` has one key a differing field.
KVHARBOR_ERROR(LayoutMismatch, StateRefused, "LAYOUT_MISMATCH");
/// The pool exists with another size.
KVHARBOR_ERROR(PoolSizeMismatch, StateRefused, "POOL_SIZE_MISMATCH");
/// The pool exists on other devices.
KVHARBOR_ERROR(PoolDevicesMismatch, StateRefused, "POOL_DEVICES_MISMATCH");
/// The pool is in use and cannot be dropped.
KVHARBOR_ERROR(PoolInUse, StateRefused, "POOL_IN_USE");
/// The block or one of its descendants is held and cannot be evicted.
KVHARBOR_ERROR(BlockHeld, StateRefused, "BLOCK_HELD");
/// The request_id was used with other arguments.
KVHARBOR_ERROR(RequestIdReused, StateRefused, "REQUEST_ID_REUSED");
/// A copy from or into the sequence is under way.
KVHARBOR_ERROR(SequenceBusy, StateRefused, "SEQUENCE_BUSY");
/// An earlier commit or hand-off of the sequence ended without an answer, and has to be repeated first.
KVHARBOR_ERROR(SequenceInDoubt, StateRefused, "SEQUENCE_IN_DOUBT");
/// The sequence was released or handed off by this process.
KVHARBOR_ERROR(SequenceEnded, StateRefused, "SEQUENCE_ENDED");
/// The service's process was replaced, and the session has not resumed the pool; the harbor does so.
KVHARBOR_ERROR(ResumeRequired, StateRefused, "RESUME_REQUIRED");
/// The kernel gives the service no proof of which process connects; `metadata` has the remedy.
KVHARBOR_ERROR(PeerUnproven, StateRefused, "PEER_UNPROVEN");
/// Another member of the session has this rank.
KVHARBOR_ERROR(RankTaken, StateRefused, "RANK_TAKEN");
/// The memory lies on a device that this process does not see.
KVHARBOR_ERROR(DeviceNotVisible, StateRefused, "DEVICE_NOT_VISIBLE");
/// This process uses the device through CUDA MPS, and the service does not take such clients.
KVHARBOR_ERROR(MpsClientRefused, StateRefused, "MPS_CLIENT_REFUSED");
/// The process that was to take over from the service's does not start; `metadata` has the cause.
KVHARBOR_ERROR(UpgradeFailed, StateRefused, "UPGRADE_FAILED");
/// The session does not hold the block by itself, or not in the state that the call needs.
KVHARBOR_ERROR(BlockNotHeld, StateRefused, "BLOCK_NOT_HELD");
/// A received descriptor would be a SIGBUS or SIGSEGV later, so it is not mapped.
KVHARBOR_ERROR(ArenaUnfit, StateRefused, "ARENA_UNFIT");
/// The pool lies on a device, and this library was built where CMake found no CUDA toolkit.
KVHARBOR_ERROR(BuiltWithoutCuda, StateRefused, "BUILT_WITHOUT_CUDA");
/// A call of the CUDA driver failed; `metadata` has call, code and detail.
KVHARBOR_ERROR(DeviceFailed, StateRefused, "DEVICE_FAILED");
/// The request does not fit now; `metadata` says what holds the memory.
KVHARBOR_ERROR(PoolExhausted, Full, "POOL_EXHAUSTED");
/// The sequences of this session have as much in their block tables as they may: release some.
KVHARBOR_ERROR(TablesFull, Full, "TABLES_FULL");
/// The pin would exceed the pool's warm budget.
KVHARBOR_ERROR(WarmBudgetExceeded, Full, "WARM_BUDGET_EXCEEDED");
/// The pool has as many unfinished warm tasks as it may.
KVHARBOR_ERROR(TooManyWarmTasks, Full, "TOO_MANY_WARM_TASKS");
/// The service has no file descriptor left; `metadata` has the limit and the remedy.
KVHARBOR_ERROR(DescriptorsExhausted, Full, "DESCRIPTORS_EXHAUSTED");
/// Not enough memory is left for the pool.
KVHARBOR_ERROR(InsufficientMemory, Full, "INSUFFICIENT_MEMORY");
/// No such pool, or another tenant's.
KVHARBOR_ERROR(PoolNotFound, Gone, "POOL_NOT_FOUND");
/// The handle never existed, or belongs to another session.
KVHARBOR_ERROR(SequenceNotFound, Gone, "SEQUENCE_NOT_FOUND");
/// The service's new process did not take the sequence up again; `metadata` has why.
KVHARBOR_ERROR(SequenceLost, Gone, "SEQUENCE_LOST");
/// What the call names is of an epoch that has ended, and with it all the KV that was in the pool.
KVHARBOR_ERROR(EpochEnded, Gone, "EPOCH_ENDED");
/// No warm pin of that name in this tenant.
KVHARBOR_ERROR(PinNotFound, Gone, "PIN_NOT_FOUND");
/// The hand-off token is unknown, used or expired.
KVHARBOR_ERROR(HandoffNotFound, Gone, "HANDOFF_NOT_FOUND");
/// That block does not hold that content.
KVHARBOR_ERROR(BlockNotFound, Gone, "BLOCK_NOT_FOUND");
/// No warm task of the pool waits to be claimed.
KVHARBOR_ERROR(WarmTaskNotFound, Gone, "WARM_TASK_NOT_FOUND");
/// No session of that id lives or waits for the end of its processes.
KVHARBOR_ERROR(SessionNotFound, Gone, "SESSION_NOT_FOUND");
/// The revision to resume a watch from is no longer kept: watch from 0.
KVHARBOR_ERROR(RevisionCompacted, Gone, "REVISION_COMPACTED");
/// The watch was cut off because it was read too slowly: watch again.
KVHARBOR_ERROR(WatcherTooSlow, Gone, "WATCHER_TOO_SLOW");
/// The service has ended the session, or has ended itself together with its state.
KVHARBOR_ERROR(SessionLost, SessionGone, "SESSION_UNKNOWN");
/// The handle is of an earlier life of the service.
KVHARBOR_ERROR(StaleEpoch, SessionGone, "STALE_EPOCH");
/// This process closed the harbor, or is a fork of the one that opened it.
KVHARBOR_ERROR(HarborClosed, SessionGone, "HARBOR_CLOSED");
/// Nobody answers at the address.
KVHARBOR_ERROR(ServiceUnreachable, Unanswered, "SERVICE_UNREACHABLE");
/// The service's process has ended and is not back yet; the call was not sent.
KVHARBOR_ERROR(ServiceAway, Unavailable, "SERVICE_AWAY");
/// The service is reserving memory.
KVHARBOR_ERROR(Starting, Unavailable, "STARTING");
/// The service is shutting down.
KVHARBOR_ERROR(Draining, Unavailable, "DRAINING");
/// No answer came within the call's deadline.
KVHARBOR_ERROR(DeadlineExceeded, Unanswered, "DEADLINE_EXCEEDED");
/// A bug of kvharbor; the service's process ends after it.
KVHARBOR_ERROR(InvariantViolation, ServiceBug, "INVARIANT_VIOLATION");

#undef KVHARBOR_ERROR

}  // namespace kvharbor
