/// @file
/// The memory of one part of a pool in this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kvharbor/layout.hpp"

namespace kvharbor {

namespace detail {
class Mapped;
}

/// Whether this library was built to map device memory: where CMake found the CUDA toolkit.
bool built_with_cuda();

/// A handle of mapped memory. Copies share it; the last one to go unmaps it. Threads may share a handle.
///
/// It may outlive its Harbor: the memory stays readable, but the blocks in it are no longer this session's. A forked
/// child does not have it: touching it there is a SIGSEGV.
class Memory {
 public:
  /// The place of every page.
  const Descriptor& descriptor() const;
  /// Which part of the pool: the rank.
  int part() const;
  /// Whether pages may be written; false for a member that joined to read.
  bool writable() const;
  /// Whether addresses are device addresses, which the host must not touch.
  bool on_device() const;

  /// Returns the address of a page, of the host or of the device. @throws InvalidField.
  std::uintptr_t address(const std::string& plane, int layer, std::int64_t block) const;
  /// Returns a page of `page_bytes` in host memory, to read. @throws InvalidField; StateRefused for device memory.
  const std::byte* page(const std::string& plane, int layer, std::int64_t block) const;
  /// Returns a page in host memory, to write. Write only positions `[cached_tokens, capacity_tokens)` of your own
  /// sequences, and of these none that has been committed.
  /// @throws InvalidField; StateRefused for device memory and where the mapping is read-only.
  std::byte* mutable_page(const std::string& plane, int layer, std::int64_t block) const;

 private:
  friend class Harbor;
  friend class Pool;
  explicit Memory(std::shared_ptr<const detail::Mapped> mapped);

  std::shared_ptr<const detail::Mapped> mapped_;
};

}  // namespace kvharbor
