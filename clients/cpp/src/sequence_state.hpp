// What a client knows of its sequence: table, cursors, shadows, and all that another process of the service would need.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvharbor/layout.hpp"
#include "kvharbor/results.hpp"
#include "kvharbor/tokens.hpp"
#include "kvharbor/v1/cache_service.pb.h"
#include "link.hpp"

namespace kvharbor::detail {

// A pool that a session has open.
struct PoolState {
  std::shared_ptr<Link> link;
  Descriptor descriptor;
  bool created = false;
};

// The tokens from `committed_tokens` on, their extra keys, and where the sequence belongs.
struct Tail {
  std::int64_t committed_tokens = 0;
  std::string token_ids;  // Little-endian uint32.
  std::vector<v1::ExtraKey> extra_keys;
  v1::NamespaceKey name_space;

  // Of a prompt that was answered with `sequence`.
  static Tail of_prompt(const v1::AllocateRequest& asked, const v1::Sequence& sequence);
  static Tail of_adopted(const v1::AdoptResponse& reply);
  // Of a child that was forked off: it has the same blocks and perhaps fewer tokens.
  Tail of_child(const v1::Sequence& child) const;
  // Forgets what is in committed blocks by now.
  void publish(std::int64_t up_to);
};

// Changed under the link's guard by calls that have it; table and cursors only by its owner's thread.
struct SequenceState : std::enable_shared_from_this<SequenceState> {
  // Returns that of a sequence which has one here, where a call is repeated, or a new one; under the link's guard.
  static std::shared_ptr<SequenceState> of(const std::shared_ptr<PoolState>& opened, const v1::Sequence& message,
                                           Tail rest);
  // Registers with the link; under its guard.
  SequenceState(std::shared_ptr<PoolState> opened, const v1::Sequence& message, Tail rest);
  ~SequenceState();
  SequenceState(const SequenceState&) = delete;
  SequenceState& operator=(const SequenceState&) = delete;

  // Throws what it has ended by.
  void require_held() const;
  // Throws what require_held does, and SequenceInDoubt while a commit or hand-off has no answer.
  void require_usable() const;
  void require_staying() const;

  // Names what is written, with the blocks that hold it by the table, so that a wrong table is noticed.
  v1::CommitItem commit_item(std::int64_t computed, const std::string& new_token_ids) const;
  // Throws CursorOutOfRange for a commit of more tokens than the table has room for. After an extend without an answer
  // the service may have room for them, and would take them. But its next process has the table that it is told, and
  // takes up no sequence that is longer.
  void require_room(const v1::CommitItem& item) const;
  v1::HeldSequence held();

  // Take in results; return the refusal, if it is one.
  std::exception_ptr extended(const v1::ExtendResult& result);
  std::exception_ptr committed(const v1::CommitItem& item, const v1::CommitResult& result);
  void resumed(const v1::ResumeResult& result);
  // Ends it, and has every later use throw the cause.
  void end_with(std::exception_ptr cause);
  // Ends it, as the next process did not take it up.
  void lose(const std::exception_ptr& cause);

  const std::shared_ptr<PoolState> pool;
  const std::string id;
  const std::string request_id;
  const std::string group;
  std::vector<std::uint32_t> block_ids;
  std::vector<std::uint64_t> generations;
  std::int64_t cached_tokens;
  std::int64_t computed_tokens;
  std::int64_t token_count;
  std::int64_t capacity_tokens;
  Tail tail;
  std::map<int, Shadow> shadows;
  std::vector<int> switched;
  // A commit that was sent and has no answer: the next one has to carry it, and another process of the service is told
  // of it as if it had taken effect.
  std::optional<v1::CommitItem> unanswered;
  // A hand-off ended without an answer.
  bool leaving = false;
  bool ended = false;

 private:
  std::int64_t token_count_with(const v1::CommitItem& item) const;
  // Whether the service would not refuse it, as there is room for it.
  bool could_take_effect(const v1::CommitItem& item) const;
  void append(const v1::BlockTable& table);
  // Adds those that have not been switched: the answer to a repeated commit and that of another process tell of all.
  void add_shadows(const google::protobuf::RepeatedPtrField<v1::Shadow>& told);

  std::exception_ptr ended_by_;
};

}  // namespace kvharbor::detail
