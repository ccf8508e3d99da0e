#include "kvharbor/harbor.hpp"

#include <utility>

#include "descriptors.hpp"
#include "link.hpp"
#include "pool_memory.hpp"
#include "sequence_state.hpp"

namespace kvharbor {

Harbor Harbor::connect(const std::string& socket_path, const Options& options) {
  return Harbor(std::make_shared<detail::Link>(socket_path, options, std::nullopt));
}

Harbor Harbor::join(const std::string& socket_path, const Membership& membership, const Options& options) {
  return Harbor(std::make_shared<detail::Link>(socket_path, options, membership));
}

Harbor::Harbor(std::shared_ptr<detail::Link> link) : link_(std::move(link)) {}
Harbor::Harbor(Harbor&&) noexcept = default;

Harbor& Harbor::operator=(Harbor&& other) noexcept {
  Harbor former(std::move(*this));
  link_ = std::move(other.link_);
  return *this;
}

Harbor::~Harbor() {
  if (!link_) return;
  try {
    close();
  } catch (...) {
    // The end of the side socket, which close has seen to, ends the session too.
  }
}

std::string Harbor::session_id() const {
  return link_->session().session_id();
}
std::string Harbor::epoch() const {
  return link_->session().epoch();
}
std::string Harbor::tenant() const {
  return link_->session().tenant();
}
std::string Harbor::join_token() const {
  return link_->session().join_token();
}

Pool Harbor::open_pool(const std::string& name, const Layout& layout, std::int64_t size_bytes,
                       const std::vector<std::string>& devices) {
  v1::OpenPoolRequest request;
  v1::OpenPoolResponse reply;
  request.set_name(name);
  *request.mutable_layout() = detail::message_of(layout);
  request.set_size_bytes(size_bytes);
  request.mutable_devices()->Add(devices.begin(), devices.end());
  detail::Call call;
  call.send = [&](const detail::Wire& wire, grpc::ClientContext& context) {
    return wire.pools->OpenPool(&context, request, &reply);
  };
  call.take = [] {};
  call.timeout = link_->options().open_pool_timeout;
  link_->run(call);
  auto state = std::make_shared<detail::PoolState>();
  state->link = link_;
  state->descriptor = detail::descriptor_of(reply.pool());
  state->created = reply.created();
  return Pool(std::move(state));
}

Memory Harbor::attach(const std::string& pool_id, std::optional<int> part) {
  return Memory(part ? detail::attach(*link_, pool_id, *part) : detail::attach_of_rank(*link_, pool_id));
}

void Harbor::close() {
  link_->close();
}

}  // namespace kvharbor
