#include "wire.hpp"

#include <utility>

namespace kvharbor::detail {
namespace {

constexpr const char* kSessionKey = "kvharbor-session";
// A prompt of 2**20 tokens is 4 MiB, its table at most another one.
constexpr int kMaxMessageBytes = 64 * 1024 * 1024;

std::shared_ptr<grpc::Channel> channel_to(const std::string& target) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  // Calls are sent again by the link, which knows what has become of the service.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // A service that comes back on this host shall be found at once.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  // The service is on this host: a proxy for the outside world is never on the way.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // What another channel knows of an earlier process must not delay this one.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

Wire::Wire(const std::string& target, std::string session_token) : Wire(channel_to(target), std::move(session_token)) {}

Wire::Wire(const std::shared_ptr<grpc::Channel>& channel, std::string session_token)
    : cache(v1::CacheService::NewStub(channel)),
      pools(v1::PoolService::NewStub(channel)),
      session_token_(std::move(session_token)) {}

void Wire::prepare(grpc::ClientContext& context, Deadline until) const {
  // gRPC's deadlines are on the wall clock's type and kept on the monotonic one.
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::duration_cast<std::chrono::system_clock::duration>(until - Clock::now()));
  if (!session_token_.empty()) context.AddMetadata(kSessionKey, session_token_);
}

}  // namespace kvharbor::detail
