#include "kvharbor/sequence.hpp"

#include <utility>

#include "calls.hpp"
#include "raising.hpp"
#include "sequence_state.hpp"

namespace kvharbor {
namespace {

using detail::SequenceState;

std::unique_lock<std::mutex> guard(const SequenceState& state) {
  state.pool->link->require_open();
  return state.pool->link->guard();
}

const std::string& pool_id_of(const SequenceState& state) {
  return state.pool->descriptor.pool_id;
}

// Runs a call on a held sequence. It may have been lost while the call waited: that says more than what the call got.
void run(const SequenceState& state, const detail::Call& call) {
  try {
    state.pool->link->run(call);
  } catch (const SequenceNotFound&) {
    const auto lock = guard(state);
    state.require_held();
    throw;
  }
}

// Sends a commit. One that has no answer is kept for the next one.
CommitResult send_commit(SequenceState& state, const v1::CommitItem& item) {
  v1::CommitRequest request;
  v1::CommitResponse reply;
  request.set_pool_id(pool_id_of(state));
  *request.add_items() = item;
  std::exception_ptr refusal;
  const auto take = [&] { refusal = state.committed(item, reply.results(0)); };
  detail::Call call = detail::cache_call(*state.pool->link, &v1::CacheService::Stub::Commit, request, reply, take);
  const std::optional<v1::CommitItem> before = state.unanswered;
  call.sending = [&] { state.unanswered = item; };
  try {
    run(state, call);
  } catch (const HarborError& failure) {
    if (!failure.outcome_unknown()) {
      const auto lock = guard(state);
      state.unanswered = before;
    }
    throw;
  }
  if (refusal) std::rethrow_exception(refusal);
  CommitResult result;
  result.committed_tokens = reply.results(0).committed_tokens();
  for (const v1::Shadow& shadow : reply.results(0).shadows()) {
    result.shadows.push_back({shadow.position(), shadow.block_id(), shadow.generation()});
  }
  return result;
}

// Sends a commit that ended without an answer again, unless `new_token_ids` and `computed` are the same commit, which
// repeats it itself. Returns the new tokens without what the sequence has taken in by now.
std::string settled(SequenceState& state, std::int64_t computed, const std::string& new_token_ids) {
  std::optional<v1::CommitItem> earlier;
  {
    const auto lock = guard(state);
    state.require_held();
    earlier = state.unanswered;
    // A hand-off is repeated as a whole.
    if (!earlier || state.leaving) return new_token_ids;
    if (state.commit_item(computed, new_token_ids).SerializeAsString() == earlier->SerializeAsString()) {
      return new_token_ids;
    }
  }
  const std::string& known = earlier->new_token_ids();
  if (new_token_ids.compare(0, known.size(), known) != 0) {
    detail::raise<SequenceInDoubt>("a commit of sequence " + state.id +
                                       " ended without an answer, and this one does not begin with its tokens: commit "
                                       "from its token_count on, or release it",
                                   {{"sequenceId", state.id}});
  }
  send_commit(state, *earlier);
  return new_token_ids.substr(known.size());
}

}  // namespace

Sequence::Sequence(std::shared_ptr<detail::SequenceState> state) : state_(std::move(state)) {}
Sequence::Sequence(Sequence&&) noexcept = default;

Sequence& Sequence::operator=(Sequence&& other) noexcept {
  Sequence former(std::move(*this));
  state_ = std::move(other.state_);
  return *this;
}

Sequence::~Sequence() {
  if (!state_) return;
  try {
    release();
  } catch (...) {
    // The end of the session, or of the service's process, releases it.
  }
}

const std::string& Sequence::id() const {
  return state_->id;
}
const std::string& Sequence::request_id() const {
  return state_->request_id;
}
const std::vector<std::uint32_t>& Sequence::block_ids() const {
  return state_->block_ids;
}
const std::vector<std::uint64_t>& Sequence::generations() const {
  return state_->generations;
}
std::int64_t Sequence::cached_tokens() const {
  return state_->cached_tokens;
}
std::int64_t Sequence::computed_tokens() const {
  return state_->computed_tokens;
}
std::int64_t Sequence::token_count() const {
  return state_->token_count;
}
std::int64_t Sequence::capacity_tokens() const {
  return state_->capacity_tokens;
}

void Sequence::require_held() const {
  const auto lock = guard(*state_);
  state_->require_held();
  state_->require_staying();
}

void Sequence::extend(std::int64_t token_count) {
  if (token_count < 0) {
    detail::raise_invalid("token_count", std::to_string(token_count), "at least 0", "capacity never shrinks");
  }
  v1::ExtendRequest request;
  v1::ExtendResponse reply;
  {
    const auto lock = guard(*state_);
    state_->require_held();
    state_->require_staying();
    request.set_pool_id(pool_id_of(*state_));
    v1::ExtendItem& item = *request.add_items();
    item.set_sequence_id(state_->id);
    item.set_capacity_tokens(state_->capacity_tokens + token_count);
    item.set_known_block_count(static_cast<std::int32_t>(state_->block_ids.size()));
  }
  std::exception_ptr refusal;
  const auto take = [&] { refusal = state_->extended(reply.results(0)); };
  run(*state_, detail::cache_call(*state_->pool->link, &v1::CacheService::Stub::Extend, request, reply, take));
  if (refusal) std::rethrow_exception(refusal);
}

CommitResult Sequence::commit(std::int64_t computed_tokens, Tokens new_tokens) {
  const std::string rest = settled(*state_, computed_tokens, detail::bytes_of(new_tokens));
  v1::CommitItem item;
  {
    const auto lock = guard(*state_);
    state_->require_held();
    state_->require_staying();
    item = state_->commit_item(computed_tokens, rest);
    state_->require_room(item);
  }
  return send_commit(*state_, item);
}

std::vector<Sequence> Sequence::fork(int child_count, std::int64_t reserve_tokens) {
  v1::ForkRequest request;
  v1::ForkResponse reply;
  {
    const auto lock = guard(*state_);
    state_->require_usable();
    request.set_pool_id(pool_id_of(*state_));
    request.set_sequence_id(state_->id);
    request.set_child_count(child_count);
    request.set_reserve_tokens(reserve_tokens);
    request.set_request_id(detail::new_request_id());
  }
  std::vector<Sequence> children;
  const auto take = [&] {
    // Nothing may throw between: a sequence that goes wants the guard.
    children.reserve(static_cast<std::size_t>(reply.children_size()));
    for (const v1::Sequence& child : reply.children()) {
      auto state = std::make_shared<SequenceState>(state_->pool, child, state_->tail.of_child(child));
      children.push_back(Sequence(std::move(state)));
    }
  };
  detail::Call call = detail::cache_call(*state_->pool->link, &v1::CacheService::Stub::Fork, request, reply, take);
  call.undo = [&request](const detail::Wire& wire, grpc::ClientContext& context) {
    v1::ReleaseRequest release;
    v1::ReleaseResponse released;
    release.set_pool_id(request.pool_id());
    for (int child = 0; child < request.child_count(); ++child) {
      release.add_items()->set_request_id(request.request_id() + "/" + std::to_string(child));
    }
    return wire.cache->Release(&context, release, &released);
  };
  run(*state_, call);
  return children;
}

std::string Sequence::handoff(std::int64_t computed_tokens, Tokens new_tokens) {
  const std::string rest = settled(*state_, computed_tokens, detail::bytes_of(new_tokens));
  v1::HandoffRequest request;
  v1::HandoffResponse reply;
  {
    const auto lock = guard(*state_);
    state_->require_held();
    request.set_pool_id(pool_id_of(*state_));
    *request.mutable_commit() = state_->commit_item(computed_tokens, rest);
    state_->require_room(request.commit());
  }
  const auto take = [this] { state_->ended = true; };
  detail::Call call = detail::cache_call(*state_->pool->link, &v1::CacheService::Stub::Handoff, request, reply, take);
  const std::optional<v1::CommitItem> before = state_->unanswered;
  bool sent = false;
  call.sending = [&] {
    state_->unanswered = request.commit();
    sent = true;
  };
  try {
    run(*state_, call);
  } catch (const HarborError& failure) {
    const auto lock = guard(*state_);
    if (!failure.outcome_unknown()) {
      state_->unanswered = before;
    } else if (sent) {
      state_->leaving = true;
    }
    throw;
  }
  return reply.handoff_token();
}

std::vector<Shadow> Sequence::shadows() const {
  const auto lock = guard(*state_);
  std::vector<Shadow> found;
  for (const auto& [position, shadow] : state_->shadows) found.push_back(shadow);
  return found;
}

std::vector<int> Sequence::switch_shadows() {
  const auto lock = guard(*state_);
  std::vector<int> positions;
  for (const auto& [position, shadow] : state_->shadows) {
    const auto entry = static_cast<std::size_t>(position);
    state_->block_ids.at(entry) = shadow.block_id;
    state_->generations.at(entry) = shadow.generation;
    positions.push_back(position);
  }
  state_->switched.insert(state_->switched.end(), positions.begin(), positions.end());
  state_->shadows.clear();
  return positions;
}

void Sequence::release() {
  detail::Link& link = *state_->pool->link;
  if (link.forked()) return;
  {
    const auto lock = link.guard();
    // Another process of the service is not told of it, and releases it.
    if (link.over() || link.away()) state_->ended = true;
    if (state_->ended) return;
  }
  v1::ReleaseRequest request;
  v1::ReleaseResponse reply;
  request.set_pool_id(pool_id_of(*state_));
  request.add_items()->set_sequence_id(state_->id);
  std::exception_ptr refusal;
  const auto take = [&] {
    const v1::ItemStatus& status = reply.results(0).status();
    if (status.code() != 0 && !state_->ended) refusal = detail::error_of(status);
    state_->ended = true;
  };
  try {
    link.run(detail::cache_call(link, &v1::CacheService::Stub::Release, request, reply, take));
  } catch (const SessionGone&) {
    const auto lock = link.guard();
    state_->ended = true;
  }
  if (refusal) std::rethrow_exception(refusal);
}

}  // namespace kvharbor
