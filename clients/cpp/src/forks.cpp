#include "forks.hpp"

#include <pthread.h>
#include <unistd.h>

#include <system_error>

namespace kvharbor::detail {
namespace {

std::mutex forking;
// A list without memory of its own: a child may not allocate.
ParentsDescriptor* first = nullptr;

void register_once() {
  static const int failure = pthread_atfork([] { forking.lock(); }, [] { forking.unlock(); }, &close_in_child);
  if (failure != 0) throw std::system_error(failure, std::system_category(), "pthread_atfork");
}

}  // namespace

void close_in_child() {
  for (ParentsDescriptor* each = first; each != nullptr; each = each->next_) {
    // No shutdown: that would end the parent's session.
    ::close(each->number_.exchange(-1));
  }
  forking.unlock();
}

std::unique_lock<std::mutex> no_fork() {
  register_once();
  return std::unique_lock(forking);
}

ParentsDescriptor::ParentsDescriptor(int (*make)()) {
  const std::unique_lock<std::mutex> lock = no_fork();
  number_ = make();
  next_ = first;
  if (first != nullptr) first->previous_ = this;
  first = this;
}

ParentsDescriptor::~ParentsDescriptor() {
  const std::unique_lock<std::mutex> lock = no_fork();
  if (previous_ != nullptr) previous_->next_ = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
  if (first == this) first = next_;
  if (number_ >= 0) ::close(number_);
}

}  // namespace kvharbor::detail
