#include "process/tensor_memory.h"

#include <algorithm>
#include <bit>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include "distrain/base/error.h"

namespace distrain::app {
namespace {

constexpr size_t kSmallest = size_t{64} << 10;  // malloc handles smaller blocks well

/// Returns the limit of idle bytes: an eighth of the machine's or container's memory, at least 256
/// MiB. It has to be large, because a ResNet stage frees some GB of activations in each batch.
size_t max_idle() {
  auto memory = static_cast<size_t>(std::max(sysconf(_SC_PHYS_PAGES), 0L)) *
                static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t limit = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit) memory = std::min(memory, limit);
  return std::max(size_t{1} << 28, memory / 8);
}

/// Rounds up to one of eight sizes per power of two; at most an eighth of a block is unused.
size_t rounded(size_t bytes) {
  const size_t step = std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

class TensorMemory final : public c10::Allocator {
 public:
  explicit TensorMemory(c10::Allocator& malloc) : malloc_(malloc) {}

  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < kSmallest ? malloc_.raw_allocate(bytes) : take(rounded(bytes));
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  /// Used by release(). Never destroyed, because tensors may outlive other static objects.
  static TensorMemory* instance;

 private:
  void* take(size_t bytes) {
    {
      std::lock_guard lock(mutex_);
      // Accept a block of up to four times the size, because an epoch's last batch is smaller.
      const auto it = idle_.lower_bound(bytes);
      if (it != idle_.end() && it->first / 4 <= bytes) {
        void* block = it->second;
        idle_bytes_ -= it->first;
        idle_.erase(it);
        return block;
      }
    }
    void* block = allocate_new(bytes);
    std::lock_guard lock(mutex_);
    sizes_[block] = bytes;
    return block;
  }

  void* allocate_new(size_t bytes) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        return malloc_.raw_allocate(bytes);
      } catch (const c10::Error&) {  // free the idle blocks and try again
        std::lock_guard lock(mutex_);
        make_room_locked(max_idle_, 0);
      }
    }
    throw base::Exception(base::ErrorKind::kResources,
                          "out of memory: no " + std::to_string(bytes >> 20) + " MiB for a tensor");
  }

  static void release(void* block) {
    if (block) instance->give_back(block);
  }

  void give_back(void* block) {
    {
      std::lock_guard lock(mutex_);
      const auto it = sizes_.find(block);
      if (it != sizes_.end()) {
        const size_t bytes = it->second;
        if (idle_bytes_ + bytes > max_idle_) make_room_locked(bytes, bytes);
        if (idle_bytes_ + bytes <= max_idle_) {
          idle_bytes_ += bytes;
          idle_.emplace_hint(idle_.lower_bound(bytes), bytes, block);
          return;
        }
        sizes_.erase(it);
      }
    }
    malloc_.raw_deallocate(block);
  }

  /// Frees idle blocks of sizes other than `but`, which an earlier phase of the job has left, until
  /// `bytes` more fit in the limit.
  void make_room_locked(size_t bytes, size_t but) {
    for (auto it = idle_.begin(); it != idle_.end() && idle_bytes_ + bytes > max_idle_;) {
      if (it->first == but) {
        it = idle_.upper_bound(but);
        continue;
      }
      sizes_.erase(it->second);
      malloc_.raw_deallocate(it->second);
      idle_bytes_ -= it->first;
      it = idle_.erase(it);
    }
  }

  c10::Allocator& malloc_;
  const size_t max_idle_ = max_idle();
  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;  // of the blocks that take() returned
  std::multimap<size_t, void*> idle_;        // by size; the block freed last comes first
  size_t idle_bytes_ = 0;
};

TensorMemory* TensorMemory::instance = nullptr;

}  // namespace

void reuse_tensor_memory() {
  TensorMemory::instance = new TensorMemory(*c10::GetDefaultCPUAllocator());
  c10::SetCPUAllocator(TensorMemory::instance);
}

}  // namespace distrain::app
