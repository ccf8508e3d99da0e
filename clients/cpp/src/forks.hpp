// What a forked child must not have.
//
// A session must not live on in a child that does not know of it, and memory must not be written there after the
// parent is known to be dead. gRPC's threads are not in a child either, so all it can do with a harbor is to forget it.
#pragma once

#include <atomic>
#include <mutex>

namespace kvharbor::detail {

// Held by whoever makes something that children must not have: a fork waits for it.
std::unique_lock<std::mutex> no_fork();

// What runs in a forked child.
void close_in_child();

// A descriptor that forked children close; its number is -1 there.
class ParentsDescriptor {
 public:
  // Takes the descriptor that `make` returns; no fork comes between.
  explicit ParentsDescriptor(int (*make)());
  ~ParentsDescriptor();
  ParentsDescriptor(const ParentsDescriptor&) = delete;
  ParentsDescriptor& operator=(const ParentsDescriptor&) = delete;

  int number() const { return number_; }

 private:
  friend void close_in_child();

  std::atomic<int> number_ = -1;
  ParentsDescriptor* next_ = nullptr;
  ParentsDescriptor* previous_ = nullptr;
};

}  // namespace kvharbor::detail
