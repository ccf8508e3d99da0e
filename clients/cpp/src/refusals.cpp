#include "refusals.hpp"

#include <optional>
#include <unordered_map>
#include <utility>

#include "raising.hpp"
#include "rpc_details.pb.h"

namespace kvharbor::detail {
namespace {

constexpr const char* kDomain = "kvharbor";
constexpr const char* kReasonPrefix = "ERROR_REASON_";

using Maker = std::exception_ptr (*)(Refusal);

template <class Kind>
std::exception_ptr make(Refusal refusal) {
  return std::make_exception_ptr(Kind(std::move(refusal)));
}

template <class Leaf>
std::pair<const std::string, Maker> entry() {
  return {Leaf::kReason, &make<Leaf>};
}

const std::unordered_map<std::string, Maker>& makers() {
  static const std::unordered_map<std::string, Maker> by_reason{
      entry<InvalidField>(),
      entry<LayoutInvalid>(),
      entry<RequestTooLarge>(),
      entry<CursorOutOfRange>(),
      entry<MessageTooLarge>(),
      entry<SessionRequired>(),
      entry<AdminRequired>(),
      entry<CommitBackwards>(),
      entry<StaleGeneration>(),
      entry<LayoutMismatch>(),
      entry<PoolSizeMismatch>(),
      entry<PoolDevicesMismatch>(),
      entry<PoolInUse>(),
      entry<BlockHeld>(),
      entry<RequestIdReused>(),
      entry<SequenceBusy>(),
      entry<SequenceInDoubt>(),
      entry<SequenceEnded>(),
      entry<ResumeRequired>(),
      entry<PeerUnproven>(),
      entry<RankTaken>(),
      entry<DeviceNotVisible>(),
      entry<MpsClientRefused>(),
      entry<UpgradeFailed>(),
      entry<BlockNotHeld>(),
      entry<DescriptorsExhausted>(),
      entry<ArenaUnfit>(),
      entry<BuiltWithoutCuda>(),
      entry<DeviceFailed>(),
      entry<PoolExhausted>(),
      entry<TablesFull>(),
      entry<WarmBudgetExceeded>(),
      entry<TooManyWarmTasks>(),
      entry<InsufficientMemory>(),
      entry<PoolNotFound>(),
      entry<SequenceNotFound>(),
      entry<SequenceLost>(),
      entry<EpochEnded>(),
      entry<PinNotFound>(),
      entry<HandoffNotFound>(),
      entry<BlockNotFound>(),
      entry<WarmTaskNotFound>(),
      entry<SessionNotFound>(),
      entry<RevisionCompacted>(),
      entry<WatcherTooSlow>(),
      entry<SessionLost>(),
      entry<StaleEpoch>(),
      entry<HarborClosed>(),
      entry<ServiceUnreachable>(),
      entry<ServiceAway>(),
      entry<Starting>(),
      entry<Draining>(),
      entry<DeadlineExceeded>(),
      entry<InvariantViolation>(),
  };
  return by_reason;
}

// What a status means that carries no reason, or one that is newer than this client.
Maker maker_of(int code) {
  switch (code) {
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::OUT_OF_RANGE:
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
      return &make<CallerMistake>;
    case grpc::StatusCode::UNIMPLEMENTED:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::ALREADY_EXISTS:
      return &make<StateRefused>;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return &make<Full>;
    case grpc::StatusCode::NOT_FOUND:
      return &make<Gone>;
    case grpc::StatusCode::UNAVAILABLE:
      return &make<Unavailable>;
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return &make<DeadlineExceeded>;
    default:
      return &make<ServiceBug>;
  }
}

std::exception_ptr error_of(Refusal refusal, int code) {
  const auto known = makers().find(refusal.reason);
  const Maker maker = known != makers().end() ? known->second : maker_of(code);
  if (refusal.message.empty()) refusal.message = refusal.reason;
  return maker(std::move(refusal));
}

template <class Map>
Metadata metadata_of(const Map& map) {
  return {map.begin(), map.end()};
}

std::chrono::milliseconds milliseconds_of(const google::protobuf::Duration& duration) {
  return std::chrono::milliseconds(duration.seconds() * 1000 + duration.nanos() / 1'000'000);
}

std::string reason_of(v1::ErrorReason reason) {
  if (reason == v1::ERROR_REASON_UNSPECIFIED) return "";
  const std::string& name = v1::ErrorReason_Name(reason);
  return name.empty() ? "REASON_" + std::to_string(reason) : name.substr(std::string(kReasonPrefix).size());
}

bool named(const google::protobuf::Any& detail, const std::string& type) {
  const std::string& url = detail.type_url();
  return url.substr(url.rfind('/') + 1) == type;
}

// The details of a status of ours; nothing for any other.
std::optional<Refusal> details_of(const grpc::Status& status) {
  client::RpcStatus details;
  if (!details.ParseFromString(status.error_details())) return std::nullopt;
  std::optional<Refusal> found;
  std::optional<std::chrono::milliseconds> retry_after;
  for (const google::protobuf::Any& detail : details.details()) {
    client::ErrorInfo info;
    client::RetryInfo retry;
    if (named(detail, "google.rpc.ErrorInfo") && info.ParseFromString(detail.value()) && info.domain() == kDomain) {
      found = Refusal{info.reason(), status.error_message(), metadata_of(info.metadata())};
    } else if (named(detail, "google.rpc.RetryInfo") && retry.ParseFromString(detail.value())) {
      retry_after = milliseconds_of(retry.retry_delay());
    }
  }
  if (found) found->retry_after = retry_after;
  return found;
}

}  // namespace

std::exception_ptr error_of(const grpc::Status& status, const std::string& address) {
  const int code = status.error_code();
  if (std::optional<Refusal> refusal = details_of(status)) return error_of(std::move(*refusal), code);
  if (code == grpc::StatusCode::UNAVAILABLE || code == grpc::StatusCode::CANCELLED) {
    return unreachable(address, status.error_message());
  }
  if (code == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return make<DeadlineExceeded>({DeadlineExceeded::kReason,
                                   "no answer from " + address +
                                       " in time: give the call a longer timeout, or look whether the service is "
                                       "overloaded",
                                   {{"address", address}}});
  }
  if (code == grpc::StatusCode::RESOURCE_EXHAUSTED) {
    // Full pools always name a reason; without one it is the transport that refuses a message.
    return make<MessageTooLarge>({MessageTooLarge::kReason, status.error_message(), {}});
  }
  return error_of(Refusal{"", status.error_message(), {}}, code);
}

std::exception_ptr error_of(const v1::ItemStatus& status) {
  Refusal refusal{reason_of(status.reason()), status.message(), metadata_of(status.metadata())};
  if (status.has_retry_delay()) refusal.retry_after = milliseconds_of(status.retry_delay());
  return error_of(std::move(refusal), status.code());
}

std::exception_ptr error_of(const v1::Refused& refused) {
  return error_of(Refusal{reason_of(refused.reason()), refused.message(), metadata_of(refused.metadata())},
                  grpc::StatusCode::UNKNOWN);
}

std::exception_ptr unreachable(const std::string& address, const std::string& cause) {
  return make<ServiceUnreachable>({ServiceUnreachable::kReason,
                                   "no kvharbor service answers at " + address + " (" + cause +
                                       "): start one with `kvharbor serve`, or name its socket",
                                   {{"address", address}}});
}

}  // namespace kvharbor::detail
