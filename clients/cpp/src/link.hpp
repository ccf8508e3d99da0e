// A session's way to the service: the side socket, the channel, and who holds what. Runs calls.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "address.hpp"
#include "clock.hpp"
#include "kvharbor/harbor.hpp"
#include "refusals.hpp"
#include "side_socket.hpp"
#include "wire.hpp"

namespace kvharbor::detail {

struct SequenceState;

// Whether a call may be sent again when its answer is lost.
enum class Repeat { kAlways, kNever };

// One unary call. `send` and `take` share the reply. `take` brings what it changes up to date, under the guard, and is
// not called for an answer that a later process of the service knows nothing of. `undo` takes the call's effect back,
// for a caller who will never see the reply.
struct Call {
  std::function<grpc::Status(const Wire&, grpc::ClientContext&)> send;
  std::function<void()> take;
  Milliseconds timeout;
  Repeat repeat = Repeat::kAlways;
  std::function<grpc::Status(const Wire&, grpc::ClientContext&)> undo = nullptr;
  // Called before it is sent, each time, under the guard: from then on another process may have to be told of it.
  std::function<void()> sending = nullptr;
};

// Runs calls. Threads may share it. Made by one process, it refuses in forked children.
//
// When the side socket has ended, the first call to notice brings the session back; others wait for that. `life_` rises
// whenever the next process is told what is held here: an answer to what was sent before must not be taken in after it.
class Link {
 public:
  // Opens the session.
  Link(const std::string& socket_path, Options options, std::optional<Membership> membership);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Sends a call until it is answered, refused or out of time. Throws the HarborError that it failed with.
  void run(const Call& call);
  // Returns the answer to a request on the side socket.
  SideAnswer ask_side(const v1::SideRequest& request);
  // Ends the session. Throws if the service could not be told; the session has ended all the same.
  void close();

  const Options& options() const { return options_; }
  const Address& address() const { return address_; }
  bool writable() const { return !membership_ || !membership_->read_only; }
  // 0: the leader's.
  int rank() const { return membership_ ? membership_->rank : 0; }
  // A copy: coming back renews it.
  v1::Welcome session() const;
  // Throws HarborClosed after close and in forked children.
  void require_open() const;
  bool forked() const;

  // Held while a sequence's state is read or changed. Not to be taken in a forked child.
  std::unique_lock<std::mutex> guard() const { return std::unique_lock(mutex_); }
  // The live sequences of all pools; under the guard.
  std::unordered_set<SequenceState*>& sequences() { return sequences_; }
  // Whether what is released need not be told, as the next process is not told of it either; under the guard.
  bool away() const;
  // Whether the session has ended for good; under the guard.
  bool over() const { return ended_by_ != nullptr; }

 private:
  struct Present {
    std::shared_ptr<SideSocket> side;
    std::shared_ptr<const Wire> wire;
    int life;
  };

  void send_until_answered(const Call& call, bool& may_have_effect);
  void close_session();
  void require_leader() const;
  Present present(Deadline until);
  void come_back(Deadline until);
  std::optional<v1::Welcome> greeted(Deadline until);
  void refused_return(const std::exception_ptr& error) const;
  bool told(const v1::Welcome& welcome, const Wire& wire, const SideSocket& side, Deadline until);
  std::vector<v1::ResumeRequest> snapshot(const v1::Welcome& welcome);
  void resumed(const v1::ResumeRequest& request, const v1::ResumeResponse& reply);
  void lose_sequences_of(const std::string& pool_id, const std::exception_ptr& cause);
  void arrive(std::shared_ptr<SideSocket> side, const v1::Welcome& welcome, std::shared_ptr<const Wire> wire);
  v1::SideRequest hello(bool resume) const;
  void end(std::exception_ptr cause);
  void undo(const Call& call, const Wire& wire) const;
  [[noreturn]] void raise_away() const;

  const Options options_;
  const std::optional<Membership> membership_;
  const Address address_;
  const pid_t process_;

  std::mutex asking_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_set<SequenceState*> sequences_;
  std::shared_ptr<SideSocket> side_;
  std::shared_ptr<const Wire> wire_;
  v1::Welcome session_;
  int life_ = 0;
  bool closing_ = false;
  std::exception_ptr ended_by_;
  // Of the thread that brings the session back, and set while there is one.
  bool returning_ = false;
  std::optional<Deadline> away_since_;
  std::shared_ptr<SideSocket> arriving_;
  // Sockets of earlier processes: whoever closes before the next process knows all loses the session.
  std::vector<std::shared_ptr<SideSocket>> earlier_;
};

}  // namespace kvharbor::detail
