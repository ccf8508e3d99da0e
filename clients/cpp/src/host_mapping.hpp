// Host memory behind a received descriptor.
#pragma once

#include <sys/types.h>

#include <cstddef>

#include "mapping.hpp"

namespace kvharbor::detail {

class HostMapping : public Mapping {
 public:
  // Maps the first `size_bytes` of the memfd, shared. Throws ArenaUnfit when it is short, no memfd, can shrink under
  // the mapping, or does not allow writing where that is asked for.
  HostMapping(int descriptor, std::size_t size_bytes, bool writable);
  ~HostMapping() override;
  HostMapping(const HostMapping&) = delete;
  HostMapping& operator=(const HostMapping&) = delete;

  std::uintptr_t base() const override { return reinterpret_cast<std::uintptr_t>(address_); }
  bool on_device() const override { return false; }

 private:
  void* address_;
  std::size_t size_bytes_;
  pid_t owner_;
};

}  // namespace kvharbor::detail
