#include "host_mapping.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "forks.hpp"
#include "raising.hpp"

namespace kvharbor::detail {
namespace {

[[noreturn]] void refuse(const std::string& cause, std::size_t size_bytes) {
  raise<ArenaUnfit>("cannot map " + std::to_string(size_bytes) + " bytes of the received descriptor: " + cause,
                    {{"cause", cause}, {"sizeBytes", std::to_string(size_bytes)}});
}

[[noreturn]] void fail(const char* call) {
  throw std::system_error(errno, std::system_category(), call);
}

void require_fit(int descriptor, std::size_t size_bytes) {
  struct stat found {};
  if (fstat(descriptor, &found) != 0) fail("fstat");
  if (found.st_size < static_cast<off_t>(size_bytes)) {
    refuse("it has " + std::to_string(found.st_size), size_bytes);
  }
  const int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 && errno == EINVAL) refuse("it is not a memfd", size_bytes);
  if (seals < 0) fail("fcntl(F_GET_SEALS)");
  if ((seals & F_SEAL_SHRINK) == 0) refuse("it is not sealed against shrinking", size_bytes);
}

}  // namespace

HostMapping::HostMapping(int descriptor, std::size_t size_bytes, bool writable)
    : size_bytes_(size_bytes), owner_(getpid()) {
  require_fit(descriptor, size_bytes);
  const auto lock = no_fork();
  address_ = mmap(nullptr, size_bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, descriptor, 0);
  if (address_ == MAP_FAILED) {
    if (errno == EACCES || errno == EPERM) refuse("it does not allow this mapping to write", size_bytes);
    fail("mmap");
  }
  if (madvise(address_, size_bytes, MADV_DONTFORK) != 0) {
    const int code = errno;
    munmap(address_, size_bytes);
    throw std::system_error(code, std::system_category(), "madvise(MADV_DONTFORK)");
  }
  // Kernels without huge pages for shared memory refuse the advice.
  madvise(address_, size_bytes, MADV_HUGEPAGE);
}

HostMapping::~HostMapping() {
  // In a forked child something else may be at the addresses by now.
  if (getpid() == owner_) munmap(address_, size_bytes_);
}

}  // namespace kvharbor::detail
