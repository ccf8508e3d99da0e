#include "kvharbor/memory.hpp"

#include <utility>

#include "kvharbor/errors.hpp"
#include "mapping.hpp"

namespace kvharbor {

Memory::Memory(std::shared_ptr<const detail::Mapped> mapped) : mapped_(std::move(mapped)) {}

const Descriptor& Memory::descriptor() const {
  return mapped_->descriptor;
}

int Memory::part() const {
  return mapped_->part;
}

bool Memory::writable() const {
  return mapped_->writable;
}

bool Memory::on_device() const {
  return mapped_->mapping->on_device();
}

std::uintptr_t Memory::address(const std::string& plane, int layer, std::int64_t block) const {
  return mapped_->mapping->base() + static_cast<std::uintptr_t>(descriptor().page_offset_bytes(plane, layer, block));
}

const std::byte* Memory::page(const std::string& plane, int layer, std::int64_t block) const {
  if (on_device()) throw StateRefused({"", "the memory is a device's: use address()", {}});
  return reinterpret_cast<const std::byte*>(address(plane, layer, block));
}

std::byte* Memory::mutable_page(const std::string& plane, int layer, std::int64_t block) const {
  if (!writable()) throw StateRefused({"", "the memory is mapped for reading only", {}});
  return const_cast<std::byte*>(page(plane, layer, block));
}

}  // namespace kvharbor
