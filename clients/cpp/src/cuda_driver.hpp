// The calls of the CUDA driver that this library makes. The library is loaded by the first one, so that programs start
// on hosts without it. Built where CMake finds cuda.h.
#pragma once

#include <cuda.h>

#include <string>
#include <vector>

namespace kvharbor::detail {

// The functions, by their names in cuda.h.
struct CudaDriver {
  decltype(&::cuInit) init;
  decltype(&::cuGetErrorName) error_name;
  decltype(&::cuGetErrorString) error_string;
  decltype(&::cuDeviceGetCount) device_count;
  decltype(&::cuDeviceGetUuid) device_uuid;
  decltype(&::cuDeviceGetName) device_name;
  decltype(&::cuDeviceGetAttribute) device_attribute;
  decltype(&::cuDevicePrimaryCtxRetain) context_retain;
  decltype(&::cuCtxPushCurrent) context_push;
  decltype(&::cuCtxPopCurrent) context_pop;
  decltype(&::cuCtxSynchronize) synchronize;
  decltype(&::cuIpcOpenMemHandle) ipc_open;
  decltype(&::cuIpcCloseMemHandle) ipc_close;
  decltype(&::cuMemGetAllocationGranularity) granularity;
  decltype(&::cuMemImportFromShareableHandle) import;
  decltype(&::cuMemRelease) release;
  decltype(&::cuMemAddressReserve) reserve;
  decltype(&::cuMemAddressFree) free_range;
  decltype(&::cuMemMap) map;
  decltype(&::cuMemUnmap) unmap;
  decltype(&::cuMemSetAccess) set_access;
};

// Returns the functions, initialised. Throws DeviceFailed where there is no driver or no device.
const CudaDriver& cuda();

// Throws DeviceFailed unless a call has succeeded.
void check(CUresult result, const char* call);

// The devices that this process sees.
struct CudaDevice {
  CUdevice ordinal;
  std::string uuid;  // "GPU-..." or "MIG-...".
};
std::vector<CudaDevice> visible_devices();

// Whether this process's work on any of them goes through an MPS server.
bool mps_client(const std::vector<CudaDevice>& devices);

// Makes the device's primary context, that of the CUDA runtime too, this thread's for a scope. The first use in a
// process retains it, for good.
class CurrentContext {
 public:
  explicit CurrentContext(CUdevice ordinal);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
};

}  // namespace kvharbor::detail
