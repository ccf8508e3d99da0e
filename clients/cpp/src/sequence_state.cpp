#include "sequence_state.hpp"

#include <algorithm>
#include <unordered_set>

#include "encoding.hpp"
#include "raising.hpp"
#include "refusals.hpp"

namespace kvharbor::detail {
namespace {

// So many the service takes with one commit; the others are reported with the next.
constexpr std::size_t kMaxSwitched = 65'536;

std::size_t bytes_of(std::int64_t token_count) {
  return static_cast<std::size_t>(token_count) * kTokenBytes;
}

std::vector<v1::ExtraKey> keys_in(const google::protobuf::RepeatedPtrField<v1::ExtraKey>& keys, std::int64_t first,
                                  std::int64_t end) {
  std::vector<v1::ExtraKey> found;
  std::copy_if(keys.begin(), keys.end(), std::back_inserter(found),
               [&](const v1::ExtraKey& key) { return key.token_offset() >= first && key.token_offset() < end; });
  return found;
}

}  // namespace

Tail Tail::of_prompt(const v1::AllocateRequest& asked, const v1::Sequence& sequence) {
  const std::int64_t first = sequence.cached_tokens();
  const std::int64_t end = sequence.token_count();
  return {first, asked.token_ids().substr(bytes_of(first), bytes_of(end - first)),
          keys_in(asked.extra_keys(), first, end), asked.namespace_()};
}

Tail Tail::of_adopted(const v1::AdoptResponse& reply) {
  return {reply.committed_tokens(),
          reply.tail_token_ids(),
          {reply.extra_keys().begin(), reply.extra_keys().end()},
          reply.namespace_()};
}

Tail Tail::of_child(const v1::Sequence& child) const {
  Tail tail = *this;
  tail.token_ids.resize(bytes_of(child.token_count() - committed_tokens));
  const auto beyond = [&](const v1::ExtraKey& key) { return key.token_offset() >= child.token_count(); };
  tail.extra_keys.erase(std::remove_if(tail.extra_keys.begin(), tail.extra_keys.end(), beyond), tail.extra_keys.end());
  return tail;
}

void Tail::publish(std::int64_t up_to) {
  if (up_to <= committed_tokens) return;
  token_ids.erase(0, bytes_of(up_to - committed_tokens));
  const auto published = [&](const v1::ExtraKey& key) { return key.token_offset() < up_to; };
  extra_keys.erase(std::remove_if(extra_keys.begin(), extra_keys.end(), published), extra_keys.end());
  committed_tokens = up_to;
}

std::shared_ptr<SequenceState> SequenceState::of(const std::shared_ptr<PoolState>& opened, const v1::Sequence& message,
                                                 Tail rest) {
  for (SequenceState* each : opened->link->sequences()) {
    if (each->id != message.sequence_id() || each->ended) continue;
    // None if it is being destroyed.
    if (std::shared_ptr<SequenceState> known = each->weak_from_this().lock()) return known;
  }
  return std::make_shared<SequenceState>(opened, message, std::move(rest));
}

SequenceState::SequenceState(std::shared_ptr<PoolState> opened, const v1::Sequence& message, Tail rest)
    : pool(std::move(opened)),
      id(message.sequence_id()),
      request_id(message.request_id()),
      group(message.group()),
      cached_tokens(message.cached_tokens()),
      computed_tokens(message.computed_tokens()),
      token_count(message.token_count()),
      capacity_tokens(message.capacity_tokens()),
      tail(std::move(rest)) {
  append(message.table());
  pool->link->sequences().insert(this);
}

SequenceState::~SequenceState() {
  if (pool->link->forked()) return;
  const auto lock = pool->link->guard();
  pool->link->sequences().erase(this);
}

void SequenceState::require_held() const {
  if (ended_by_ != nullptr) std::rethrow_exception(ended_by_);
  if (ended) {
    raise<SequenceEnded>("sequence " + id + " was released or handed off: allocate a new one", {{"sequenceId", id}});
  }
}

void SequenceState::require_usable() const {
  require_held();
  if (unanswered) {
    raise<SequenceInDoubt>(
        "a commit of sequence " + id + " ended without an answer: commit again, with its tokens, or release",
        {{"sequenceId", id}});
  }
  require_staying();
}

void SequenceState::require_staying() const {
  if (leaving) {
    raise<SequenceInDoubt>("the hand-off of sequence " + id + " ended without an answer: hand it off again, or release",
                           {{"sequenceId", id}});
  }
}

v1::CommitItem SequenceState::commit_item(std::int64_t computed, const std::string& new_token_ids) const {
  v1::CommitItem item;
  item.set_sequence_id(id);
  item.set_computed_tokens(computed);
  item.set_new_token_ids(new_token_ids);
  item.set_known_token_count(token_count);
  const auto reported = switched.begin() + static_cast<std::ptrdiff_t>(std::min(switched.size(), kMaxSwitched));
  item.mutable_switched_positions()->Assign(switched.begin(), reported);
  if (computed > computed_tokens) {
    const std::int64_t block_tokens = pool->descriptor.layout.block_tokens;
    const auto block_count = static_cast<std::int64_t>(block_ids.size());
    const std::int64_t first = std::min(computed_tokens / block_tokens, block_count);
    const std::int64_t end = std::min((computed + block_tokens - 1) / block_tokens, block_count);
    v1::BlockTable& written = *item.mutable_written();
    written.set_block_ids(encoded(block_ids.begin() + first, block_ids.begin() + end));
    written.set_generations(encoded(generations.begin() + first, generations.begin() + end));
  }
  return item;
}

void SequenceState::require_room(const v1::CommitItem& item) const {
  const std::int64_t token_count_then = token_count_with(item);
  if (token_count_then <= capacity_tokens) return;
  const std::string value = std::to_string(token_count_then);
  const std::string limit = std::to_string(capacity_tokens);
  const std::string remedy = "extend the sequence first";
  raise<CursorOutOfRange>(
      "sequence " + id + ": token_count would be " + value + ", at most " + limit + " is possible; " + remedy,
      {{"sequenceId", id}, {"cursor", "token_count"}, {"value", value}, {"limit", limit}, {"remedy", remedy}});
}

v1::HeldSequence SequenceState::held() {
  // What was switched is in the table already.
  switched.clear();
  v1::HeldSequence message;
  v1::Sequence& sequence = *message.mutable_sequence();
  sequence.set_sequence_id(id);
  sequence.mutable_table()->set_block_ids(encoded(block_ids.begin(), block_ids.end()));
  sequence.mutable_table()->set_generations(encoded(generations.begin(), generations.end()));
  sequence.set_cached_tokens(cached_tokens);
  sequence.set_computed_tokens(computed_tokens);
  sequence.set_token_count(token_count);
  sequence.set_capacity_tokens(capacity_tokens);
  sequence.set_request_id(request_id);
  sequence.set_group(group);
  *message.mutable_namespace_() = tail.name_space;
  message.set_committed_tokens(tail.committed_tokens);
  message.set_tail_token_ids(tail.token_ids);
  message.mutable_extra_keys()->Add(tail.extra_keys.begin(), tail.extra_keys.end());
  if (unanswered && could_take_effect(*unanswered)) {
    // It may have taken effect, and the service takes up no sequence that has less than its ledger.
    sequence.set_computed_tokens(unanswered->computed_tokens());
    sequence.set_token_count(token_count_with(*unanswered));
    message.mutable_tail_token_ids()->append(unanswered->new_token_ids());
  }
  return message;
}

std::int64_t SequenceState::token_count_with(const v1::CommitItem& item) const {
  return token_count + static_cast<std::int64_t>(item.new_token_ids().size() / kTokenBytes);
}

bool SequenceState::could_take_effect(const v1::CommitItem& item) const {
  return item.computed_tokens() >= computed_tokens && item.computed_tokens() <= token_count_with(item);
}

std::exception_ptr SequenceState::extended(const v1::ExtendResult& result) {
  if (ended_by_ != nullptr) return ended_by_;
  if (result.status().code() != 0) return error_of(result.status());
  append(result.added());
  capacity_tokens = result.capacity_tokens();
  return nullptr;
}

std::exception_ptr SequenceState::committed(const v1::CommitItem& item, const v1::CommitResult& result) {
  unanswered.reset();
  if (ended_by_ != nullptr) return ended_by_;
  if (result.status().code() != 0) return error_of(result.status());
  token_count = token_count_with(item);
  computed_tokens = item.computed_tokens();
  tail.token_ids += item.new_token_ids();
  const std::unordered_set<int> reported(item.switched_positions().begin(), item.switched_positions().end());
  switched.erase(
      std::remove_if(switched.begin(), switched.end(), [&](int position) { return reported.count(position) != 0; }),
      switched.end());
  tail.publish(result.committed_tokens());
  add_shadows(result.shadows());
  return nullptr;
}

void SequenceState::resumed(const v1::ResumeResult& result) {
  if (ended) return;
  if (result.status().code() != 0) return lose(error_of(result.status()));
  // Of an unanswered commit its answer says what is published.
  if (!unanswered) tail.publish(result.committed_tokens());
  shadows.clear();
  add_shadows(result.shadows());
}

void SequenceState::add_shadows(const google::protobuf::RepeatedPtrField<v1::Shadow>& told) {
  const std::unordered_set<int> exchanged(switched.begin(), switched.end());
  for (const v1::Shadow& shadow : told) {
    if (exchanged.count(shadow.position()) == 0) {
      shadows[shadow.position()] = {shadow.position(), shadow.block_id(), shadow.generation()};
    }
  }
}

void SequenceState::end_with(std::exception_ptr cause) {
  if (ended) return;
  ended = true;
  ended_by_ = std::move(cause);
}

void SequenceState::lose(const std::exception_ptr& cause) {
  Metadata metadata{{"sequenceId", id}};
  std::string why;
  try {
    std::rethrow_exception(cause);
  } catch (const HarborError& error) {
    metadata.insert(error.metadata().begin(), error.metadata().end());
    metadata["cause"] = error.reason();
    why = error.what();
  }
  end_with(std::make_exception_ptr(SequenceLost(
      {SequenceLost::kReason,
       "the service's new process has not taken up sequence " + id + " (" + why + "): allocate again", metadata})));
}

void SequenceState::append(const v1::BlockTable& table) {
  decode(table.block_ids(), block_ids);
  decode(table.generations(), generations);
}

}  // namespace kvharbor::detail
