/// @file
/// The way in: a session with a kvharbor service.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvharbor/errors.hpp"
#include "kvharbor/layout.hpp"
#include "kvharbor/memory.hpp"
#include "kvharbor/pool.hpp"
#include "kvharbor/results.hpp"
#include "kvharbor/sequence.hpp"
#include "kvharbor/tokens.hpp"

namespace kvharbor {

namespace detail {
class Link;
}

/// What computes in a session, for people. Printable characters; name and version at most 64 bytes, instance 128.
struct Engine {
  std::string name;      ///< Of the software. Empty: this library.
  std::string version;   ///< Its version.
  std::string instance;  ///< Tells it from others, the same after a restart. Empty: `client_name`, else the pid.
};

/// How to open a session.
struct Options {
  std::string client_name;                  ///< For people, at most 128 bytes.
  Milliseconds timeout{10'000};             ///< Deadline of connect and of every later call but open_pool.
  Milliseconds open_pool_timeout{120'000};  ///< Reserving memory takes a while.
  /// How long a call waits for the service's next process, within its deadline. Unset: until the deadline.
  std::optional<Milliseconds> away_wait;
  Engine engine;  ///< What `kvharbor stats` tells.
};

/// Which member of another process's session to be.
struct Membership {
  std::string join_token;  ///< The leader's `Harbor::join_token`; secret.
  int rank = 0;            ///< From 1 on, unique in the session.
  bool read_only = false;  ///< Maps for reading only: a guard against accidents.
};

/// A connection with its session. Move-only; threads may share it. The session lives until `close`, the destructor or
/// the end of this process, however that comes.
///
/// It does not survive a fork: the child's copy of the session is closed, and its calls throw HarborClosed.
///
/// When the service's process is replaced, the next call brings the session back: sequences, tables and mappings stay
/// as they were. It waits for that up to its deadline and to `Options::away_wait`, then throws ServiceAway. A service
/// that has lost its state ends the harbor (SessionLost): connect again.
class Harbor {
 public:
  /// Opens a session at the service's Unix socket; the side socket lies beside it.
  /// @throws ServiceUnreachable at once when nobody listens there or this process may not connect; InvalidField,
  /// DeadlineExceeded, Starting, PeerUnproven.
  static Harbor connect(const std::string& socket_path, const Options& options = {});

  /// Joins the session of another process of the same engine: maps what its leader has opened, and makes no calls but
  /// `attach`: others throw SessionRequired. The loss of any member, its `close` too, is the loss of the session.
  /// @throws as connect; RankTaken, SessionLost.
  static Harbor join(const std::string& socket_path, const Membership& membership, const Options& options = {});

  Harbor(Harbor&&) noexcept;
  Harbor& operator=(Harbor&&) noexcept;
  Harbor(const Harbor&) = delete;
  Harbor& operator=(const Harbor&) = delete;
  /// Closes as `close` does and swallows what that would throw: the end of the side socket ends the session too.
  ~Harbor();

  /// The session's name in stats and logs.
  std::string session_id() const;
  /// The life of the service's state that the session belongs to.
  std::string epoch() const;
  /// Whom the service takes this process for.
  std::string tenant() const;
  /// Secret for `join` in the engine's other processes; empty for these.
  std::string join_token() const;

  /// Finds the pool of this name or makes it. `size_bytes` is of each part; 0: the service's choice. `devices`: UUIDs
  /// for the parts, by rank; empty: the service's choice. Maps nothing: see Pool::attach.
  /// @throws LayoutInvalid, LayoutMismatch, PoolSizeMismatch, PoolDevicesMismatch, InsufficientMemory.
  Pool open_pool(const std::string& name, const Layout& layout, std::int64_t size_bytes = 0,
                 const std::vector<std::string>& devices = {});

  /// Maps a part of a pool that the session has open, for a member of it. Without `part` that of the member's rank, or
  /// part 0 where the layout's tp_size is 1. @throws as Pool::attach; PoolNotFound; InvalidField for a part that the
  /// pool has not.
  Memory attach(const std::string& pool_id, std::optional<int> part = std::nullopt);

  /// Ends the session and its sequences. Asserts that nothing of this process touches a block any more and all device
  /// work is done: the blocks are free at once. Calls under way in other threads end with an error, at the latest at
  /// their deadlines. Repeating it does nothing. @throws Unavailable if the service could not be told.
  void close();

 private:
  explicit Harbor(std::shared_ptr<detail::Link> link);

  std::shared_ptr<detail::Link> link_;
};

}  // namespace kvharbor
