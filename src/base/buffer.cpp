#include "distrain/base/buffer.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <map>

namespace distrain::base {

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kSmallest = 512;

// Blocks come in sizes of four steps to the doubling, so at most a quarter is wasted.
size_t size_class(size_t size) {
  size = std::max(size, kSmallest);
  const size_t step = std::bit_floor(size) / 4;
  return (size + step - 1) / step * step;
}

}  // namespace

struct BufferPool::Shelf {
  explicit Shelf(size_t max) : max_idle_bytes(max) {}
  ~Shelf() {
    for (auto& [size, blocks] : idle) {
      for (void* block : blocks) std::free(block);
    }
  }

  void* take(size_t size) {
    {
      std::lock_guard lock(mutex);
      const auto it = idle.find(size);
      if (it != idle.end() && !it->second.empty()) {
        void* block = it->second.back();
        it->second.pop_back();
        idle_bytes -= size;
        return block;
      }
    }
    return std::aligned_alloc(kAlignment, size);
  }

  void give(void* block, size_t size) {
    {
      std::lock_guard lock(mutex);
      if (idle_bytes + size <= max_idle_bytes) {
        idle[size].push_back(block);
        idle_bytes += size;
        return;
      }
    }
    std::free(block);
  }

  const size_t max_idle_bytes;
  std::mutex mutex;
  size_t idle_bytes = 0;
  std::map<size_t, std::vector<void*>> idle;
};

BufferPool::BufferPool(size_t max_idle_bytes) : shelf_(std::make_shared<Shelf>(max_idle_bytes)) {}

BufferPtr BufferPool::allocate(size_t size) {
  if (size > PTRDIFF_MAX) return nullptr;  // rounded up it would be a small one
  const size_t block_size = size_class(size);
  void* block = shelf_->take(block_size);
  if (!block) return nullptr;
  auto* buffer = new Buffer{static_cast<uint8_t*>(block), size};
  return BufferPtr(buffer, [shelf = shelf_, block_size](Buffer* b) {
    shelf->give(b->data, block_size);
    delete b;
  });
}

}  // namespace distrain::base
