/// @file
/// A pool that a session has open.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "kvharbor/layout.hpp"
#include "kvharbor/memory.hpp"
#include "kvharbor/results.hpp"
#include "kvharbor/sequence.hpp"
#include "kvharbor/tokens.hpp"

namespace kvharbor {

namespace detail {
struct PoolState;
}

/// A handle of an open pool. Copies mean the same pool; threads may share it. Not to be used after its Harbor's end:
/// calls throw HarborClosed then.
class Pool {
 public:
  /// Names the pool for the other members of the session.
  const std::string& id() const;
  /// Layout and addresses.
  const Descriptor& descriptor() const;
  /// Whether this session's open_pool made it.
  bool created() const;

  /// Maps the memory of a part, shared and writable, and returns it. A tensor-parallel rank maps its own.
  /// @throws ArenaUnfit; BuiltWithoutCuda, DeviceNotVisible, MpsClientRefused, DeviceFailed for a pool on devices.
  Memory attach(int part = 0) const;

  /// Holds what is there of a prompt and reserves blocks for the rest, in one step. Undone if it runs out of time.
  /// @throws PoolExhausted (does not fit now, or not within `wait`), RequestTooLarge, RequestIdReused.
  Sequence allocate(Tokens tokens, const AllocateOptions& options = {}) const;

  /// Takes a sequence that was handed off. @throws HandoffNotFound.
  Sequence adopt(const std::string& handoff_token) const;

  /// Tells what of a prompt is there. Changes nothing, recency neither. Of `options` the match's fields count.
  Lookup lookup(Tokens tokens, const AllocateOptions& options = {}) const;

  /// Pins what is there of a prefix against eviction, under a name, until `unwarm` or the end of `ttl`.
  /// Of `options` the namespace and the extra keys count. @throws WarmBudgetExceeded.
  Pinned warmup_present(Tokens tokens, const std::string& name, std::optional<Milliseconds> ttl = std::nullopt,
                        const AllocateOptions& options = {}) const;

  /// Ends a pin. Not repeated when its answer is lost. @throws PinNotFound.
  void unwarm(const std::string& name) const;

  /// Returns a consistent snapshot.
  PoolStats stats() const;

 private:
  friend class Harbor;
  explicit Pool(std::shared_ptr<detail::PoolState> state);

  std::shared_ptr<detail::PoolState> state_;
};

}  // namespace kvharbor
