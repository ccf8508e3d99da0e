// Device memory. Built from device_mapping_cuda.cpp where CMake finds the CUDA toolkit, else from
// device_mapping_none.cpp.
#pragma once

#include <memory>
#include <vector>

#include "mapping.hpp"

namespace kvharbor::detail {

// What this process can do with devices. Throws BuiltWithoutCuda; DeviceFailed, also where there is no driver or
// device.
v1::DeviceView device_view();

// Maps a part that lies on a device: "cuda_ipc" or "cuda_vmm". Throws DeviceNotVisible, DeviceFailed, ArenaUnfit,
// BuiltWithoutCuda.
std::unique_ptr<Mapping> map_device(const v1::Attached& attached, const std::vector<FileDescriptor>& chunks,
                                    bool writable);

}  // namespace kvharbor::detail
