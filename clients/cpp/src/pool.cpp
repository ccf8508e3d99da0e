#include "kvharbor/pool.hpp"

#include <utility>

#include "calls.hpp"
#include "pool_memory.hpp"
#include "sequence_state.hpp"

namespace kvharbor {
namespace {

using detail::SequenceState;

void set(google::protobuf::Duration& duration, Milliseconds value) {
  duration.set_seconds(value.count() / 1000);
  duration.set_nanos(static_cast<std::int32_t>(value.count() % 1000) * 1'000'000);
}

// Sets what a prompt means beside its tokens, in a request of any kind.
template <class Request>
void set_context(Request& request, const AllocateOptions& options) {
  v1::NamespaceKey& key = *request.mutable_namespace_();
  key.set_version(options.name_space.version);
  key.set_adapter(options.name_space.adapter);
  key.set_salt(options.name_space.salt);
  for (const ExtraKey& each : options.extra_keys) {
    v1::ExtraKey& added = *request.add_extra_keys();
    added.set_token_offset(each.token_offset);
    added.set_value(each.value);
  }
}

v1::AllocateRequest allocate_request(const std::string& pool_id, Tokens tokens, const AllocateOptions& options) {
  v1::AllocateRequest request;
  request.set_pool_id(pool_id);
  request.set_token_ids(detail::bytes_of(tokens));
  set_context(request, options);
  request.set_reserve_tokens(options.reserve_tokens);
  if (options.max_cached_tokens) request.set_max_cached_tokens(*options.max_cached_tokens);
  request.set_request_id(options.request_id.empty() ? detail::new_request_id() : options.request_id);
  request.set_group(options.group);
  if (options.wait > Milliseconds(0)) set(*request.mutable_wait(), options.wait);
  return request;
}

PoolStats stats_of(const v1::PoolStats& message) {
  PoolStats stats;
  stats.total_block_count = message.total_block_count();
  stats.free_block_count = message.free_block_count();
  stats.reserved_block_count = message.reserved_block_count();
  stats.active_block_count = message.active_block_count();
  stats.cached_block_count = message.cached_block_count();
  stats.warm_block_count = message.warm_block_count();
  stats.quarantined_block_count = message.quarantined_block_count();
  stats.sequence_count = message.sequence_count();
  return stats;
}

// What ends the sequence that a call has made under this request_id; not one that is here, which the call has repeated.
auto released_by(const detail::PoolState& pool, const std::string& request_id) {
  return [&pool, request_id](const detail::Wire& wire, grpc::ClientContext& context) {
    v1::ReleaseRequest request;
    v1::ReleaseResponse reply;
    {
      const auto lock = pool.link->guard();
      for (const SequenceState* each : pool.link->sequences()) {
        const bool same_pool = each->pool->descriptor.pool_id == pool.descriptor.pool_id;
        if (same_pool && each->request_id == request_id && !each->ended) return grpc::Status::OK;
      }
    }
    request.set_pool_id(pool.descriptor.pool_id);
    request.add_items()->set_request_id(request_id);
    return wire.cache->Release(&context, request, &reply);
  };
}

void nothing() {}

}  // namespace

Pool::Pool(std::shared_ptr<detail::PoolState> state) : state_(std::move(state)) {}

const std::string& Pool::id() const {
  return state_->descriptor.pool_id;
}
const Descriptor& Pool::descriptor() const {
  return state_->descriptor;
}
bool Pool::created() const {
  return state_->created;
}

Memory Pool::attach(int part) const {
  return Memory(detail::attach(*state_->link, id(), part));
}

Sequence Pool::allocate(Tokens tokens, const AllocateOptions& options) const {
  const v1::AllocateRequest request = allocate_request(id(), tokens, options);
  v1::AllocateResponse reply;
  std::shared_ptr<SequenceState> held;
  const auto take = [&] {
    held = SequenceState::of(state_, reply.sequence(), detail::Tail::of_prompt(request, reply.sequence()));
  };
  detail::Call call = detail::cache_call(*state_->link, &v1::CacheService::Stub::Allocate, request, reply, take);
  call.timeout += options.wait;
  call.undo = released_by(*state_, request.request_id());
  state_->link->run(call);
  return Sequence(std::move(held));
}

Sequence Pool::adopt(const std::string& handoff_token) const {
  v1::AdoptRequest request;
  v1::AdoptResponse reply;
  request.set_pool_id(id());
  request.set_handoff_token(handoff_token);
  request.set_request_id(detail::new_request_id());
  std::shared_ptr<SequenceState> held;
  const auto take = [&] { held = SequenceState::of(state_, reply.sequence(), detail::Tail::of_adopted(reply)); };
  detail::Call call = detail::cache_call(*state_->link, &v1::CacheService::Stub::Adopt, request, reply, take);
  call.undo = released_by(*state_, request.request_id());
  state_->link->run(call);
  return Sequence(std::move(held));
}

Lookup Pool::lookup(Tokens tokens, const AllocateOptions& options) const {
  v1::LookupRequest request;
  v1::LookupResponse reply;
  request.set_pool_id(id());
  request.set_token_ids(detail::bytes_of(tokens));
  set_context(request, options);
  if (options.max_cached_tokens) request.set_max_cached_tokens(*options.max_cached_tokens);
  state_->link->run(detail::cache_call(*state_->link, &v1::CacheService::Stub::Lookup, request, reply, nothing));
  return {reply.present_tokens(), reply.cached_tokens()};
}

Pinned Pool::warmup_present(Tokens tokens, const std::string& name, std::optional<Milliseconds> ttl,
                            const AllocateOptions& options) const {
  v1::WarmupRequest request;
  v1::WarmupResponse reply;
  request.set_pool_id(id());
  request.set_token_ids(detail::bytes_of(tokens));
  set_context(request, options);
  request.set_name(name);
  if (ttl) set(*request.mutable_ttl(), *ttl);
  request.set_fill(v1::WARMUP_FILL_NOBODY);
  state_->link->run(detail::cache_call(*state_->link, &v1::CacheService::Stub::Warmup, request, reply, nothing));
  return {reply.pinned_tokens(), reply.missing_tokens()};
}

void Pool::unwarm(const std::string& name) const {
  v1::UnwarmRequest request;
  v1::UnwarmResponse reply;
  request.set_pool_id(id());
  request.set_name(name);
  detail::Call call = detail::cache_call(*state_->link, &v1::CacheService::Stub::Unwarm, request, reply, nothing);
  call.repeat = detail::Repeat::kNever;
  state_->link->run(call);
}

PoolStats Pool::stats() const {
  v1::StatsRequest request;
  v1::StatsResponse reply;
  request.set_pool_id(id());
  state_->link->run(detail::cache_call(*state_->link, &v1::CacheService::Stub::Stats, request, reply, nothing));
  return stats_of(reply.pools(0));
}

}  // namespace kvharbor
