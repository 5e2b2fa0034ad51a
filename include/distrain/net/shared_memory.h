#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "distrain/base/error.h"
#include "distrain/net/socket.h"

namespace distrain::net {

/// Memory that several processes map. It has no name: a process passes its descriptor to others
/// (OutFrame::descriptor). Its size is sealed, so that no process can cause a SIGBUS in another
/// one by truncating it. Thread-safe.
class SharedMemory {
 public:
  /// Creates and maps `bytes` zero bytes. Pages take memory only once they are written. Sets
  /// `descriptor`, which may be closed after it is passed on. Fails with `resources`.
  static base::Result<std::shared_ptr<SharedMemory>> create(size_t bytes, Fd& descriptor);
  /// Maps memory whose descriptor another process has sent. Fails with `protocol` if the memory is
  /// smaller than `bytes` or not sealed, and with `resources` if it cannot be mapped.
  static base::Result<std::shared_ptr<SharedMemory>> open(const Fd& descriptor, size_t bytes);
  /// Returns false if the system refuses create(), as a sandbox may do.
  static bool is_available();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  std::span<uint8_t> bytes() const { return bytes_; }

 private:
  explicit SharedMemory(std::span<uint8_t> bytes) : bytes_(bytes) {}
  static base::Result<std::shared_ptr<SharedMemory>> map(const Fd& descriptor, size_t bytes);

  const std::span<uint8_t> bytes_;
};

}  // namespace distrain::net
