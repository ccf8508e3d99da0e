#include "cuda_driver.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <type_traits>

#include "raising.hpp"

namespace kvharbor::detail {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

[[noreturn]] void fail(const std::string& call, const std::string& code, const std::string& text) {
  raise<DeviceFailed>(call + " failed with " + code + ": " + text, {{"call", call}, {"code", code}, {"detail", text}});
}

void* library_symbol(const char* name) {
  void* library = dlopen(kLibrary, RTLD_NOW);
  if (library == nullptr) fail("dlopen", "NOT_FOUND", std::string(kLibrary) + ": install the NVIDIA driver");
  void* found = dlsym(library, name);
  if (found == nullptr) fail("dlsym", "NOT_FOUND", std::string("the driver lacks ") + name + ": install a newer one");
  return found;
}

CudaDriver loaded() {
  // Gives functions with the binary interface that this cuda.h declares.
  const auto lookup = reinterpret_cast<decltype(&::cuGetProcAddress)>(library_symbol("cuGetProcAddress_v2"));
  const auto find = [lookup](const char* name, auto& function) {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    const CUresult result = lookup(name, &found, CUDA_VERSION, CU_GET_PROC_ADDRESS_DEFAULT, &status);
    if (result != CUDA_SUCCESS || found == nullptr) fail(name, "NOT_FOUND", "the driver lacks it: install a newer one");
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  CudaDriver driver{};
  find("cuInit", driver.init);
  find("cuGetErrorName", driver.error_name);
  find("cuGetErrorString", driver.error_string);
  find("cuDeviceGetCount", driver.device_count);
  find("cuDeviceGetUuid", driver.device_uuid);
  find("cuDeviceGetName", driver.device_name);
  find("cuDeviceGetAttribute", driver.device_attribute);
  find("cuDevicePrimaryCtxRetain", driver.context_retain);
  find("cuCtxPushCurrent", driver.context_push);
  find("cuCtxPopCurrent", driver.context_pop);
  find("cuCtxSynchronize", driver.synchronize);
  find("cuIpcOpenMemHandle", driver.ipc_open);
  find("cuIpcCloseMemHandle", driver.ipc_close);
  find("cuMemGetAllocationGranularity", driver.granularity);
  find("cuMemImportFromShareableHandle", driver.import);
  find("cuMemRelease", driver.release);
  find("cuMemAddressReserve", driver.reserve);
  find("cuMemAddressFree", driver.free_range);
  find("cuMemMap", driver.map);
  find("cuMemUnmap", driver.unmap);
  find("cuMemSetAccess", driver.set_access);
  const CUresult started = driver.init(0);
  if (started != CUDA_SUCCESS) fail("cuInit", std::to_string(started), "the driver sees no device here");
  return driver;
}

CUcontext retained(CUdevice ordinal) {
  static std::mutex retaining;
  static std::map<CUdevice, CUcontext> contexts;
  const std::lock_guard<std::mutex> lock(retaining);
  const auto known = contexts.find(ordinal);
  if (known != contexts.end()) return known->second;
  CUcontext context = nullptr;
  check(cuda().context_retain(&context, ordinal), "cuDevicePrimaryCtxRetain");
  return contexts[ordinal] = context;
}

std::string uuid_text(CUdevice ordinal) {
  CUuuid uuid{};
  check(cuda().device_uuid(&uuid, ordinal), "cuDeviceGetUuid");
  char name[256] = {};
  check(cuda().device_name(name, sizeof name - 1, ordinal), "cuDeviceGetName");
  // The driver does not say which kind a UUID is of; the name of a slice has its profile ("... MIG 1g.10gb").
  std::string text = std::string(name).find(" MIG ") != std::string::npos ? "MIG-" : "GPU-";
  constexpr const char* kDigits = "0123456789abcdef";
  for (int index = 0; index < 16; ++index) {
    const auto byte = static_cast<unsigned char>(uuid.bytes[index]);
    if (index == 4 || index == 6 || index == 8 || index == 10) text.push_back('-');
    text.append({kDigits[byte >> 4], kDigits[byte & 15]});
  }
  return text;
}

// What tells of MPS where the driver or its header does not know the attribute, both older than CUDA 12.2.
bool mps_daemon_there() {
  const char* folder = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  return access((std::string(folder != nullptr ? folder : "/tmp/nvidia-mps") + "/control").c_str(), F_OK) == 0;
}

}  // namespace

const CudaDriver& cuda() {
  static const CudaDriver driver = loaded();
  return driver;
}

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  const char* text = nullptr;
  cuda().error_name(result, &name);
  cuda().error_string(result, &text);
  fail(call, name != nullptr ? name : std::to_string(result), text != nullptr ? text : "unknown to the driver");
}

std::vector<CudaDevice> visible_devices() {
  int count = 0;
  check(cuda().device_count(&count), "cuDeviceGetCount");
  std::vector<CudaDevice> devices;
  for (CUdevice ordinal = 0; ordinal < count; ++ordinal) devices.push_back({ordinal, uuid_text(ordinal)});
  return devices;
}

bool mps_client(const std::vector<CudaDevice>& devices) {
#if CUDA_VERSION >= 12020
  for (const CudaDevice& device : devices) {
    int enabled = 0;
    const CUresult result = cuda().device_attribute(&enabled, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device.ordinal);
    if (result == CUDA_ERROR_INVALID_VALUE) return mps_daemon_there();
    check(result, "cuDeviceGetAttribute");
    if (enabled != 0) return true;
  }
  return false;
#else
  static_cast<void>(devices);
  return mps_daemon_there();
#endif
}

CurrentContext::CurrentContext(CUdevice ordinal) {
  check(cuda().context_push(retained(ordinal)), "cuCtxPushCurrent");
}

CurrentContext::~CurrentContext() {
  CUcontext popped = nullptr;
  cuda().context_pop(&popped);
}

}  // namespace kvharbor::detail
