#include "distrain/nn/tensor_memory.h"

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

namespace distrain::nn {
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

/// Eight sizes for each power of two: at most an eighth of a block is unused, and not touched.
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

  /// Deleters, plain functions, find their allocator here. Never destroyed: tensors may come last.
  static TensorMemory* instance;

 private:
  void* take(size_t bytes) {
    {
      std::lock_guard lock(mutex_);
      // One of up to four times the size will do: an epoch's last batch is smaller.
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
          idle_.emplace_hint(idle_.lower_bound(bytes), bytes, block);
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
  std::unordered_map<void*, size_t> sizes_;  // of the big blocks
  std::multimap<size_t, void*> idle_;        // by size; of one size the last to come is the first
  size_t idle_bytes_ = 0;
};

TensorMemory* TensorMemory::instance = nullptr;

}  // namespace

void reuse_tensor_memory() {
  TensorMemory::instance = new TensorMemory(*c10::GetDefaultCPUAllocator());
  c10::SetCPUAllocator(TensorMemory::instance);
}

}  // namespace distrain::nn
