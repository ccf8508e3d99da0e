// A part of a pool at a fixed address range of this process.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "file_descriptor.hpp"
#include "kvharbor/layout.hpp"
#include "kvharbor/v1/side.pb.h"

namespace kvharbor::detail {

// Mapped memory; its destructor lets go of it, but not in a forked child, which does not have it.
class Mapping {
 public:
  virtual ~Mapping() = default;
  virtual std::uintptr_t base() const = 0;
  virtual bool on_device() const = 0;
};

// What a Memory refers to.
class Mapped {
 public:
  Mapped(Descriptor pool, int rank, bool may_write, std::unique_ptr<Mapping> memory)
      : descriptor(std::move(pool)), part(rank), writable(may_write), mapping(std::move(memory)) {}

  const Descriptor descriptor;
  const int part;
  const bool writable;
  const std::unique_ptr<Mapping> mapping;
};

// Maps what an Attached announces and its descriptors carry, which may be closed after that.
// Throws ArenaUnfit, std::system_error, and for devices what device_mapping.hpp says.
std::shared_ptr<const Mapped> map_attached(const v1::Attached& attached, const std::vector<FileDescriptor>& descriptors,
                                           bool writable);

}  // namespace kvharbor::detail
