#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace distrain::base {

/// A block of bytes, aligned to 64, that goes back to its pool when the last owner lets go.
struct Buffer {
  uint8_t* data = nullptr;
  size_t size = 0;
};
using BufferPtr = std::shared_ptr<Buffer>;

/// Reuses receive buffers: the page faults of a fresh 64 MiB block cost more than its transfer.
/// Thread-safe. Buffers may outlive the pool object.
class BufferPool {
 public:
  /// At most `max_idle_bytes` are kept for reuse, those that were in use last, and one block that
  /// is larger than that and at most four times as large: by default 256 MiB and 1 GiB, as much as
  /// a rank lets calls take (AgentOptions::total_budget). Larger ones are rare and freed at once.
  explicit BufferPool(size_t max_idle_bytes = size_t{256} << 20);

  /// A buffer of `size` bytes with undefined content; nullptr when there is no memory.
  BufferPtr allocate(size_t size);

 private:
  struct Shelf;
  std::shared_ptr<Shelf> shelf_;
};

}  // namespace distrain::base
