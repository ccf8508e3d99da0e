// Never run on hardware: see the README. The rules are those of gpumem's ipc_mapping.py and vmm_mapping.py.
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

#include "cuda_driver.hpp"
#include "device_mapping.hpp"
#include "kvharbor/memory.hpp"
#include "raising.hpp"

namespace kvharbor {

bool built_with_cuda() {
  return true;
}

namespace detail {
namespace {

[[noreturn]] void refuse(const std::string& cause, std::int64_t size_bytes) {
  raise<ArenaUnfit>("cannot map " + std::to_string(size_bytes) + " bytes of device memory: " + cause,
                    {{"cause", cause}, {"sizeBytes", std::to_string(size_bytes)}});
}

// A UUID without the prefix, which depends on the program that wrote it.
std::string bare(std::string uuid) {
  std::transform(uuid.begin(), uuid.end(), uuid.begin(), [](unsigned char each) { return std::tolower(each); });
  const bool prefixed = uuid.rfind("gpu-", 0) == 0 || uuid.rfind("mig-", 0) == 0;
  return prefixed ? uuid.substr(4) : uuid;
}

CUdevice device_of(const std::string& uuid) {
  std::string visible;
  for (const CudaDevice& device : visible_devices()) {
    if (bare(device.uuid) == bare(uuid)) return device.ordinal;
    visible += (visible.empty() ? "" : ", ") + device.uuid;
  }
  raise<DeviceNotVisible>("the pool lies on device " + uuid + ", this process sees " + visible,
                          {{"device", uuid}, {"visibleDevices", visible}});
}

// Handles that this process has open: the driver opens one once a process, so it is counted, and closed last.
class OpenHandles {
 public:
  CUdeviceptr open(CUdevice device, const std::string& handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Opened& opened = opened_[handle];
    if (opened.use_count == 0) {
      CUipcMemHandle content{};
      std::memcpy(&content, handle.data(), std::min(handle.size(), sizeof content));
      const CurrentContext current(device);
      const CUresult result = cuda().ipc_open(&opened.address, content, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
      if (result != CUDA_SUCCESS) opened_.erase(handle);
      check(result, "cuIpcOpenMemHandle");
    }
    ++opened.use_count;
    return opened.address;
  }

  void close(CUdevice device, const std::string& handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = opened_.find(handle);
    if (--found->second.use_count > 0) return;
    const CurrentContext current(device);
    // What this process has queued must not outlive the mapping.
    cuda().synchronize();
    cuda().ipc_close(found->second.address);
    opened_.erase(found);
  }

 private:
  struct Opened {
    CUdeviceptr address = 0;
    int use_count = 0;
  };

  std::mutex mutex_;
  std::map<std::string, Opened> opened_;
};

OpenHandles& handles() {
  static OpenHandles opened;
  return opened;
}

class IpcMapping : public Mapping {
 public:
  IpcMapping(CUdevice device, std::string handle, std::int64_t offset_bytes)
      : device_(device),
        handle_(std::move(handle)),
        owner_(getpid()),
        address_(handles().open(device, handle_) + static_cast<CUdeviceptr>(offset_bytes)) {}

  ~IpcMapping() override {
    if (getpid() != owner_) return;
    try {
      handles().close(device_, handle_);
    } catch (const HarborError&) {
      // The context is broken, and the mapping with it.
    }
  }

  std::uintptr_t base() const override { return static_cast<std::uintptr_t>(address_); }
  bool on_device() const override { return true; }

 private:
  CUdevice device_;
  std::string handle_;
  pid_t owner_;
  CUdeviceptr address_;
};

// Chunks one after the other in a range of device addresses.
class VmmMapping : public Mapping {
 public:
  VmmMapping(CUdevice device, const std::vector<FileDescriptor>& chunks, const std::vector<std::int64_t>& chunk_bytes,
             bool writable)
      : owner_(getpid()) {
    const auto whole_bytes =
        static_cast<std::size_t>(std::accumulate(chunk_bytes.begin(), chunk_bytes.end(), std::int64_t{0}));
    check(cuda().reserve(&address_, whole_bytes, 0, 0, 0), "cuMemAddressReserve");
    reserved_bytes_ = whole_bytes;
    try {
      for (std::size_t index = 0; index < chunks.size(); ++index) {
        map(chunks[index].number(), static_cast<std::size_t>(chunk_bytes[index]));
      }
      CUmemAccessDesc access{};
      access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      access.location.id = device;
      access.flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
      check(cuda().set_access(address_, whole_bytes, &access, 1), "cuMemSetAccess");
    } catch (...) {
      let_go();
      throw;
    }
  }

  ~VmmMapping() override {
    if (getpid() == owner_) let_go();
  }

  std::uintptr_t base() const override { return static_cast<std::uintptr_t>(address_); }
  bool on_device() const override { return true; }

 private:
  void map(int descriptor, std::size_t size_bytes) {
    CUmemGenericAllocationHandle handle = 0;
    void* const as_pointer = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor));
    check(cuda().import(&handle, as_pointer, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
          "cuMemImportFromShareableHandle");
    const CUresult result = cuda().map(address_ + mapped_bytes_, size_bytes, 0, handle, 0);
    // What is mapped stays without the handle.
    cuda().release(handle);
    check(result, "cuMemMap");
    mapped_.push_back(size_bytes);
    mapped_bytes_ += size_bytes;
  }

  void let_go() {
    for (; !mapped_.empty(); mapped_.pop_back()) {
      mapped_bytes_ -= mapped_.back();
      cuda().unmap(address_ + mapped_bytes_, mapped_.back());
    }
    cuda().free_range(address_, reserved_bytes_);
  }

  pid_t owner_;
  CUdeviceptr address_ = 0;
  std::size_t reserved_bytes_ = 0;
  std::size_t mapped_bytes_ = 0;
  std::vector<std::size_t> mapped_;
};

std::unique_ptr<Mapping> map_ipc(const v1::DeviceMemory& memory, std::int64_t size_bytes, bool writable) {
  if (!writable) refuse("CUDA IPC cannot map read-only: map it for writing, or use the arena cuda_vmm", size_bytes);
  if (memory.ipc_handle().size() != sizeof(CUipcMemHandle) || memory.offset_bytes() < 0) {
    refuse("its handle is broken", size_bytes);
  }
  if (memory.exporter_pid() == getpid()) {
    refuse("exporter and importer both have pid " + std::to_string(getpid()) +
               ", each in a PID namespace of its own, and the driver takes them for one process: let them share a PID "
               "namespace, or use the arena cuda_vmm",
           size_bytes);
  }
  return std::make_unique<IpcMapping>(device_of(memory.device()), memory.ipc_handle(), memory.offset_bytes());
}

std::size_t granularity_bytes(CUdevice device) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = device;
  std::size_t bytes = 0;
  check(cuda().granularity(&bytes, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), "cuMemGetAllocationGranularity");
  return bytes;
}

std::unique_ptr<Mapping> map_vmm(const v1::DeviceMemory& memory, std::int64_t size_bytes,
                                 const std::vector<FileDescriptor>& chunks, bool writable) {
  const CUdevice device = device_of(memory.device());
  const std::vector<std::int64_t> chunk_bytes(memory.chunk_bytes().begin(), memory.chunk_bytes().end());
  const auto granularity = static_cast<std::int64_t>(granularity_bytes(device));
  if (chunk_bytes.empty() || chunk_bytes.size() != chunks.size())
    refuse("it has other chunks than descriptors", size_bytes);
  std::int64_t whole_bytes = 0;
  for (const std::int64_t each : chunk_bytes) {
    // Bounded before they are added: the numbers come from the wire.
    if (each < 1 || each % granularity != 0 || each > (std::int64_t{1} << 47))
      refuse("a chunk has an odd size", size_bytes);
    whole_bytes += each;
  }
  if (whole_bytes < size_bytes) refuse("its chunks have " + std::to_string(whole_bytes), size_bytes);
  return std::make_unique<VmmMapping>(device, chunks, chunk_bytes, writable);
}

}  // namespace

v1::DeviceView device_view() {
  const std::vector<CudaDevice> devices = visible_devices();
  v1::DeviceView view;
  for (const CudaDevice& device : devices) view.add_visible_devices(device.uuid);
  view.set_mps_client(mps_client(devices));
  return view;
}

std::unique_ptr<Mapping> map_device(const v1::Attached& attached, const std::vector<FileDescriptor>& chunks,
                                    bool writable) {
  const std::string& kind = attached.pool().arena_kind();
  const std::int64_t size_bytes = attached.pool().size_bytes();
  if (kind == "cuda_ipc") return map_ipc(attached.device_memory(), size_bytes, writable);
  if (kind == "cuda_vmm") return map_vmm(attached.device_memory(), size_bytes, chunks, writable);
  refuse("it is of the kind " + kind + ", which this client does not know", size_bytes);
}

}  // namespace detail
}  // namespace kvharbor
