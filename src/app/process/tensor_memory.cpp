#include "process/tensor_memory.h"

#include <algorithm>
#include <bit>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include "distrain/base/error.h"

namespace distrain::app {
namespace {

constexpr size_t kSmallest = size_t{64} << 10;  // below, malloc is quick and does not spread

/// More goes back to malloc. A stage of a ResNet lets go of some GB of activations in each batch;
/// an eighth of the memory, which a container may have less of than the machine, is for each rank.
size_t max_idle() {
  auto memory = static_cast<size_t>(std::max(sysconf(_SC_PHYS_PAGES), 0L)) *
                static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t limit = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit) memory = std::min(memory, limit);
  return std::max(size_t{1} << 28, memory / 8);
}

/// Eight sizes for each power of two: at most an eighth of a block is not asked for, and not
/// touched either.
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

  /// Deleters are plain functions: they find their allocator here. Never destroyed, as tensors may
  /// outlive everything else.
  static TensorMemory* instance;

 private:
  void* take(size_t bytes) {
    {
      std::lock_guard lock(mutex_);
      // One of up to four times the size will do: an epoch's last batch is smaller.
      for (auto it = idle_.lower_bound(bytes); it != idle_.end() && it->first / 4 <= bytes; ++it) {
        if (it->second.empty()) continue;
        void* block = it->second.back();
        it->second.pop_back();
        idle_bytes_ -= it->first;
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
      } catch (const c10::Error&) {  // what lies idle here may be what is missing
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
          idle_[bytes].push_back(block);
          return;
        }
        sizes_.erase(it);
      }
    }
    malloc_.raw_deallocate(block);
  }

  /// Gives idle blocks of other sizes than `but` back to malloc until there is room for `bytes`
  /// more: they are of a phase that is over.
  void make_room_locked(size_t bytes, size_t but) {
    for (auto& [size, blocks] : idle_) {
      while (size != but && !blocks.empty() && idle_bytes_ + bytes > max_idle_) {
        sizes_.erase(blocks.back());
        malloc_.raw_deallocate(blocks.back());
        blocks.pop_back();
        idle_bytes_ -= size;
      }
    }
  }

  c10::Allocator& malloc_;
  const size_t max_idle_ = max_idle();
  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;  // of the big blocks
  std::map<size_t, std::vector<void*>> idle_;
  size_t idle_bytes_ = 0;
};

TensorMemory* TensorMemory::instance = nullptr;

}  // namespace

void reuse_tensor_memory() {
  TensorMemory::instance = new TensorMemory(*c10::GetDefaultCPUAllocator());
  c10::SetCPUAllocator(TensorMemory::instance);
}

}  // namespace distrain::app
