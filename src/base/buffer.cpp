#include "distrain/base/buffer.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace distrain::base {

constexpr size_t kAlignment = 64;
constexpr size_t kSmallest = 512;
constexpr size_t kLargest = 4;             // the large block's limit, in units of max_idle_bytes
constexpr uint64_t kLargeIsKept = 10'000;  // until this many other blocks are returned

// Rounds `size` up to one of four steps per power of two, so at most a quarter of it is wasted.
static size_t size_class(size_t size) {
  size = std::max(size, kSmallest);
  const size_t step = std::bit_floor(size) / 4;
  return (size + step - 1) / step * step;
}

struct BufferPool::Shelf {
  struct Idle {
    void* data;
    uint64_t since;  // number of blocks returned before this one
  };

  explicit Shelf(size_t max) : max_idle_bytes(max) {}
  ~Shelf() {
    std::free(large.data);
    for (auto& [size, blocks] : idle) {
      for (const Idle& block : blocks) std::free(block.data);
    }
  }

  void* take(size_t size) {
    {
      std::lock_guard lock(mutex);
      if (large.data && large_size == size) return std::exchange(large.data, nullptr);
      const auto it = idle.find(size);
      if (it != idle.end() && !it->second.empty()) {
        void* block = it->second.back().data;
        it->second.pop_back();
        idle_bytes -= size;
        return block;
      }
    }
    return std::aligned_alloc(kAlignment, size);
  }

  // Keeps `block` for reuse and frees the blocks that have been idle longest. Keeps one block above
  // `max_idle_bytes` until kLargeIsKept other blocks have been returned: if each training step
  // receives a tensor of that size, only the first step causes page faults.
  void give(void* block, size_t size) {
    if (size > kLargest * max_idle_bytes) return std::free(block);
    std::vector<void*> evicted;
    {
      std::lock_guard lock(mutex);
      const Idle given_now{block, given++};
      if (size > max_idle_bytes) {
        evicted.push_back(std::exchange(large, given_now).data);
        large_size = size;
      } else {
        idle[size].push_back(given_now);
        idle_bytes += size;
      }
      while (idle_bytes > max_idle_bytes) evicted.push_back(evict());
      if (large.data && given - large.since > kLargeIsKept) {
        evicted.push_back(std::exchange(large.data, nullptr));
      }
    }
    for (void* each : evicted) std::free(each);
  }

  void* evict() {
    const auto since = [](const auto& shelf) {
      return shelf.second.empty() ? UINT64_MAX : shelf.second.front().since;
    };
    const auto oldest = std::ranges::min_element(idle, {}, since);
    void* const block = oldest->second.front().data;
    oldest->second.pop_front();
    idle_bytes -= oldest->first;
    return block;
  }

  const size_t max_idle_bytes;
  std::mutex mutex;
  size_t idle_bytes = 0;
  uint64_t given = 0;
  Idle large{nullptr, 0};
  size_t large_size = 0;
  std::map<size_t, std::deque<Idle>> idle;  // by size; the oldest first
};

BufferPool::BufferPool(size_t max_idle_bytes) : shelf_(std::make_shared<Shelf>(max_idle_bytes)) {}

BufferPtr BufferPool::allocate(size_t size) {
  if (size > PTRDIFF_MAX) return nullptr;  // size_class() could overflow
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
