// Deadlines, by the monotonic clock.
#pragma once

#include <algorithm>
#include <chrono>

namespace kvharbor::detail {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Whole milliseconds until `deadline`, rounded up, for poll(2); 0 when it has passed.
inline int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<decltype(left)>(left, 0, 1'000'000'000));
}

}  // namespace kvharbor::detail
