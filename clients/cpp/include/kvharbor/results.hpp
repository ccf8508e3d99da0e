/// @file
/// What calls take and give beside the objects that hold something.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvharbor {

using Milliseconds = std::chrono::milliseconds;

/// The caller's part of a namespace. Blocks never match across namespaces.
struct Namespace {
  std::string version;  ///< The caller's name for its weights' version.
  std::string adapter;  ///< LoRA adapter or the like.
  std::string salt;     ///< Any bytes, at most 256; separates users whose prompts must not meet.
};

/// Tells equal placeholder tokens apart (images, audio).
struct ExtraKey {
  std::int64_t token_offset = 0;  ///< From the start of the sequence.
  std::string value;              ///< Identity of what stands there, 1 to 256 bytes.
};

/// What an allocate may say beside the prompt.
struct AllocateOptions {
  std::int64_t reserve_tokens = 0;  ///< Capacity beyond the prompt.
  /// Upper bound of the match. Unset: all tokens but one, as a model must compute one at least for logits.
  std::optional<std::int64_t> max_cached_tokens;
  std::string request_id;  ///< Unique among the session's live sequences; empty: one is made.
  std::string group;       ///< For people and tools.
  Milliseconds wait{0};    ///< How long to wait for room, beside the call's timeout.
  Namespace name_space;
  std::vector<ExtraKey> extra_keys;  ///< In order of token_offset.
};

/// An own block at `position` of the table whose content another block had already published.
struct Shadow {
  int position = 0;
  std::uint32_t block_id = 0;
  std::uint64_t generation = 0;
};

/// What a commit did.
struct CommitResult {
  std::int64_t committed_tokens = 0;  ///< Tokens in published blocks.
  std::vector<Shadow> shadows;        ///< Among the blocks of this commit.
};

/// How much of a prompt is there.
struct Lookup {
  std::int64_t present_tokens = 0;  ///< In committed whole blocks.
  std::int64_t cached_tokens = 0;   ///< What an allocate would reuse now.
};

/// What a pin holds.
struct Pinned {
  std::int64_t pinned_tokens = 0;   ///< Present, and safe from eviction.
  std::int64_t missing_tokens = 0;  ///< Of the prefix's whole blocks, not there.
};

/// One pool at one moment: free + reserved + active + cached + warm + quarantined = total.
struct PoolStats {
  std::int64_t total_block_count = 0;  ///< Scratch blocks are beside it.
  std::int64_t free_block_count = 0;
  std::int64_t reserved_block_count = 0;
  std::int64_t active_block_count = 0;
  std::int64_t cached_block_count = 0;
  std::int64_t warm_block_count = 0;
  std::int64_t quarantined_block_count = 0;
  std::int64_t sequence_count = 0;
};

}  // namespace kvharbor
