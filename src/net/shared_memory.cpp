#include "distrain/net/shared_memory.h"

#include <cerrno>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "net_impl.h"

namespace distrain::net {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

static base::Error no_memory() {
  return {base::ErrorKind::kResources, socket_error("shared memory", errno).message};
}

base::Result<std::shared_ptr<SharedMemory>> SharedMemory::create(size_t bytes, Fd& descriptor) {
  // Beyond RLIMIT_FSIZE, ftruncate() would end the process by SIGXFSZ.
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur) {
    return base::Error{base::ErrorKind::kResources, "shared memory: beyond RLIMIT_FSIZE"};
  }
  descriptor = Fd(::memfd_create("distrain", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor.valid() || ::ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(descriptor.get(), F_ADD_SEALS, kSeals) != 0) {
    return no_memory();
  }
  return map(descriptor, bytes);
}

base::Result<std::shared_ptr<SharedMemory>> SharedMemory::open(const Fd& descriptor, size_t bytes) {
  constexpr long kTmpfs = 0x01021994;  // hugetlbfs can have no page left, which is a SIGBUS
  struct stat info {};
  struct statfs system {};
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  if (::fstatfs(descriptor.get(), &system) != 0 || system.f_type != kTmpfs || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0 || ::fstat(descriptor.get(), &info) != 0 || info.st_size < 0 ||
      static_cast<uint64_t>(info.st_size) < bytes) {
    return base::Error{base::ErrorKind::kProtocol, "a descriptor that is not sealed memory"};
  }
  return map(descriptor, bytes);
}

base::Result<std::shared_ptr<SharedMemory>> SharedMemory::map(const Fd& descriptor, size_t bytes) {
  void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (at == MAP_FAILED) return no_memory();
  return std::shared_ptr<SharedMemory>(new SharedMemory({static_cast<uint8_t*>(at), bytes}));
}

bool SharedMemory::is_available() {
  Fd descriptor;
  return create(1, descriptor).ok();
}

SharedMemory::~SharedMemory() { ::munmap(bytes_.data(), bytes_.size()); }

}  // namespace distrain::net
