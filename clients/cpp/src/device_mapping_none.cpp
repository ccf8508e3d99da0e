#include "device_mapping.hpp"
#include "kvharbor/memory.hpp"
#include "raising.hpp"

namespace kvharbor {

bool built_with_cuda() {
  return false;
}

namespace detail {
namespace {

[[noreturn]] void refuse() {
  raise<BuiltWithoutCuda>("the pool lies on a device, and this library was built where CMake found no CUDA toolkit",
                          {{"remedy", "build it where CMake finds the CUDA toolkit"}});
}

}  // namespace

v1::DeviceView device_view() {
  refuse();
}

std::unique_ptr<Mapping> map_device(const v1::Attached&, const std::vector<FileDescriptor>&, bool) {
  refuse();
}

}  // namespace detail
}  // namespace kvharbor
