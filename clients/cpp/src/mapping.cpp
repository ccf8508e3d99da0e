#include "mapping.hpp"

#include <utility>

#include "descriptors.hpp"
#include "device_mapping.hpp"
#include "host_mapping.hpp"
#include "kvharbor/errors.hpp"

namespace kvharbor::detail {
namespace {

constexpr const char* kHostArena = "host";

}  // namespace

std::shared_ptr<const Mapped> map_attached(const v1::Attached& attached, const std::vector<FileDescriptor>& descriptors,
                                           bool writable) {
  Descriptor pool = descriptor_of(attached.pool());
  std::unique_ptr<Mapping> mapping;
  if (pool.arena_kind != kHostArena) {
    mapping = map_device(attached, descriptors, writable);
  } else if (descriptors.size() == 1) {
    const auto size_bytes = static_cast<std::size_t>(pool.size_bytes);
    mapping = std::make_unique<HostMapping>(descriptors.front().number(), size_bytes, writable);
  } else {
    throw ServiceBug({"", "the service answered an attach without the pool's memory", {}});
  }
  return std::make_shared<const Mapped>(std::move(pool), attached.part(), writable, std::move(mapping));
}

}  // namespace kvharbor::detail
