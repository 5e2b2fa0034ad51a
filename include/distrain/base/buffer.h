#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace distrain::base {

/// A 64-byte aligned block of bytes, which returns to its pool when the last owner releases it.
struct Buffer {
  uint8_t* data = nullptr;
  size_t size = 0;
};
using BufferPtr = std::shared_ptr<Buffer>;

/// Reuses receive buffers, because the page faults of a fresh 64 MiB block take longer than its
/// transfer. Thread-safe. Buffers may outlive the pool object.
class BufferPool {
 public:
  /// Creates a pool that keeps idle blocks of up to `max_idle_bytes` in total, and one larger block
  /// of up to four times `max_idle_bytes` (by default 1 GiB, as AgentOptions::total_budget).
  explicit BufferPool(size_t max_idle_bytes = size_t{256} << 20);
  /// Returns a buffer of `size` bytes with undefined content, or nullptr if there is no memory.
  BufferPtr allocate(size_t size);

 private:
  struct Shelf;
  std::shared_ptr<Shelf> shelf_;
};

}  // namespace distrain::base
