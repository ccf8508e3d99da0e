/// @file
/// A held prompt.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvharbor/results.hpp"
#include "kvharbor/tokens.hpp"

namespace kvharbor {

namespace detail {
struct SequenceState;
}

/// A held prompt: what was there is readable, the rest is writable. Move-only; released when destroyed.
///
///     cached_tokens <= computed_tokens <= token_count <= capacity_tokens
///
/// Belongs to one thread at a time. Where an allocate is repeated by its request_id both objects are the same sequence,
/// and the first that is released or destroyed ends it. One that was moved from may only be destroyed or assigned to.
/// Entry i of its table holds tokens `[i * block_tokens, (i + 1) * block_tokens)`. The destructor releases as `release`
/// does and swallows what that would throw: what could not be told to the service is held until the session ends, or
/// until its process is replaced.
class Sequence {
 public:
  Sequence(Sequence&&) noexcept;
  Sequence& operator=(Sequence&&) noexcept;
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;
  ~Sequence();

  /// The service's handle.
  const std::string& id() const;
  /// As given at allocate, or made by the client.
  const std::string& request_id() const;
  /// Blocks in order. Changed only by this object's own calls.
  const std::vector<std::uint32_t>& block_ids() const;
  /// One a block: (block, generation) names one content.
  const std::vector<std::uint64_t>& generations() const;
  /// Leading tokens whose KV was in the pool.
  std::int64_t cached_tokens() const;
  /// Leading tokens whose KV is written.
  std::int64_t computed_tokens() const;
  /// Tokens known.
  std::int64_t token_count() const;
  /// Tokens that the table has room for.
  std::int64_t capacity_tokens() const;

  /// Returns once the blocks are known to be this session's still.
  /// @throws SequenceEnded after release or hand-off; SequenceInDoubt after a hand-off without an answer; SequenceLost,
  /// SessionGone if it has ended otherwise. Asks nobody.
  void require_held() const;

  /// Adds capacity for so many more tokens, in whole blocks. May be repeated after any error.
  /// @throws PoolExhausted: release a sequence, e.g. by preempting one; RequestTooLarge.
  void extend(std::int64_t token_count);

  /// Declares the KV of the first `computed_tokens` tokens written and visible, and publishes full blocks. On a device:
  /// synchronise the stream that wrote, before. `new_tokens` are the ids from token_count on; their own KV may come
  /// with a later commit. They need room in the table: extend first, and again after an extend that has thrown.
  ///
  /// A commit that throws has not moved token_count: the next one names its tokens again. Where the answer was lost
  /// (`outcome_unknown`) it is repeated first, and has one effect; until then the sequence can only be committed,
  /// extended and released.
  /// @throws CommitBackwards, CursorOutOfRange, StaleGeneration; SequenceInDoubt for other tokens than were in doubt.
  CommitResult commit(std::int64_t computed_tokens, Tokens new_tokens = {});

  /// Makes children that share the committed blocks and own a copy of the rest that is computed. All or none.
  /// @throws PoolExhausted, RequestTooLarge, SequenceInDoubt.
  std::vector<Sequence> fork(int child_count, std::int64_t reserve_tokens = 0);

  /// Commits and gives the sequence away; returns the secret token to adopt it with, once. The sequence ends here: this
  /// process touches its blocks no more. A token that nobody adopts in time (30 s by default) releases it. Without an
  /// answer it can be repeated with the same arguments, or released.
  /// @throws as commit.
  std::string handoff(std::int64_t computed_tokens, Tokens new_tokens = {});

  /// Own blocks that another block has the content of, and that are still in the table.
  std::vector<Shadow> shadows() const;
  /// Replaces the table's shadows by the canonical blocks; returns their positions. They must not be touched any more,
  /// device work in flight included. The service takes them back with the next commit, which reports the positions.
  std::vector<int> switch_shadows();

  /// Ends the sequence: committed blocks stay cached, the rest is free. Repeating it does nothing, nor does a session
  /// that has ended. On a device: wait for the streams that read its blocks, before. While the service is away it
  /// returns at once: the next process releases what it is not told of.
  void release();

 private:
  friend class Pool;
  explicit Sequence(std::shared_ptr<detail::SequenceState> state);

  std::shared_ptr<detail::SequenceState> state_;
};

}  // namespace kvharbor
