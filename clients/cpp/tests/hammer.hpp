// Threads that share a harbor: each allocates, writes, commits, verifies and releases a prompt of its own, again and
// again.
#pragma once

#include <kvharbor/harbor.hpp>

#include <atomic>
#include <cstdint>
#include <future>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "pages.hpp"

namespace hammer {

// Returns the tokens that were found to be right.
inline std::int64_t once(kvharbor::Pool& pool, const kvharbor::Memory& memory, std::uint32_t first_token) {
  std::vector<std::uint32_t> tokens(32);
  std::iota(tokens.begin(), tokens.end(), first_token);
  kvharbor::Sequence sequence = pool.allocate(tokens);
  std::int64_t right_tokens = 0;
  for (std::int64_t position = 0; position < 32; ++position) {
    const auto expected = static_cast<float>(first_token + position);
    if (position >= sequence.cached_tokens()) pages::stamp(memory, sequence, position, expected);
    if (pages::stamp_of(memory, sequence, position) != expected) throw std::runtime_error("wrong bytes");
    ++right_tokens;
  }
  sequence.commit(32);
  sequence.release();
  return right_tokens;
}

inline std::int64_t run(kvharbor::Pool& pool, const kvharbor::Memory& memory, std::uint32_t thread_count,
                        int round_count) {
  std::atomic<std::int64_t> right_tokens{0};
  std::vector<std::future<void>> threads;
  for (std::uint32_t thread = 0; thread < thread_count; ++thread) {
    threads.push_back(std::async(std::launch::async, [&, thread] {
      for (int round = 0; round < round_count; ++round) right_tokens += once(pool, memory, 1000 * (thread + 1));
    }));
  }
  for (std::future<void>& each : threads) each.get();
  return right_tokens;
}

}  // namespace hammer
